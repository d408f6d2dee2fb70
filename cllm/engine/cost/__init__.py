"""What a step will take, as it was measured and is learned, and what follows from that."""
