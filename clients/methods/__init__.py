"""One client a method."""
