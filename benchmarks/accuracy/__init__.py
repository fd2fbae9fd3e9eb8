"""How near predictions come to what the compilers say."""
