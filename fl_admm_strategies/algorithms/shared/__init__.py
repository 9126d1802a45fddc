"""What several methods need: base classes, messages and rules; no method."""
