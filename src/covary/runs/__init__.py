"""What outlives a run: files that survive a crash, run folders, and what a report draws of them."""
