"""How a number is stored: one number format a file, decoded and encoded."""
