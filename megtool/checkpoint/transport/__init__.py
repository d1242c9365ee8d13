"""How bytes move: units of work, tiles, strided blocks, casts."""
