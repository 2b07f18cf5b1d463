"""What a run leaves on disk, for all who write or read it. Nothing here imports torch."""
