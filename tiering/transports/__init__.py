"""How blocks travel between nodes."""
