"""What the processes say to each other, and who decides what."""
