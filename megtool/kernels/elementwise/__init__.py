"""Operations along a row: activations, norms, rotary embedding, dropout and addition."""
