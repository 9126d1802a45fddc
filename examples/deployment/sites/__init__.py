"""Three sites with data of their own."""
