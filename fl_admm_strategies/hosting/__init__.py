"""Where a run happens: Flower's legacy API, and a grid in this process."""
