"""Models as named arrays, heads, and which layers are personal."""
