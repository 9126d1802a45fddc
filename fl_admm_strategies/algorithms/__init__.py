"""The methods, one file each; a file holds what its paper says."""
