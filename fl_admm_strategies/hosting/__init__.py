"""Where a run happens: Flower's legacy strategy API, and a grid in this process."""
