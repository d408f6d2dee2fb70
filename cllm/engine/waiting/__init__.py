"""Who waits, who may join them, whose turn it is, who follows another, and who is tried by himself after a failure."""
