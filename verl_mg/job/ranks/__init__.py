"""The ranks of a job: how they meet, what signals ask of them, how one that dies or hangs is named, how all leave."""
