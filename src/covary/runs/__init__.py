"""Files that survive a crash, run folders, interruptions, and the machine."""
