"""Reading any checkpoint under any names, without converting it first."""
