"""Launcher of the ranks of a node: torchrun with the exit code of the ranks, restarts that take seconds, and spares.

__main__      starts the fork server, then `command`
command       arguments, signals and exit codes
agent         torchrun's agent of a node, which starts the ranks again after a loss, unless it is always the same one
program       the program of a rank in a fork of a process that has imported everything
imported      what that process imports

    launcher process          main thread: `RankAgent`; handles signals
     ├─ thread                ends the other ranks after the first loss, the launcher where it does not see their ends
     ├─ fork server           imports a job's modules once; its children are the ranks
     └─ socket                never answered: kept engines see its end, and so the end of the launcher
"""
