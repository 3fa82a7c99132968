"""Which block goes when a tier is full: the port and its policies."""
