"""Places of runs: folders on a file system, and objects below a URL."""
