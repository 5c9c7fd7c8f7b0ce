"""Starts a command in a sandbox once a socket listens there; sent into the sandbox as text and never imported.

Arguments: the descriptor of the channel of `relay.py` and a port, or two dashes; then the command.
"""

import os
import socket
import sys

channel, port, *command = sys.argv[1:]
# The relay keeps the socket open; the program inherits neither the socket nor the channel.
if port != "-":
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    with listener, socket.socket(fileno=int(channel)) as connection:
        socket.send_fds(connection, [b"listener"], [listener.fileno()])
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)  # as in a shell
