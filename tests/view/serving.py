"""A server of runs in a thread, and requests to it."""

import http.client
import json
import threading
from urllib.parse import urlencode, urlsplit

from verl_mg.view.run import Run
from verl_mg.view.server import Viewer


class serving:  # noqa: N801
    """In it, a function that asks a server of these runs and returns the JSON of its answer."""

    def __init__(self, *folders):
        self.viewer = Viewer([Run(folder) for folder in folders])
        self.thread = threading.Thread(target=self.viewer.serve_forever, args=(0.05,))

    def __enter__(self):
        self.thread.start()
        return self.json

    def __exit__(self, *error):
        self.viewer.shutdown()
        self.viewer.server_close()
        self.thread.join()

    def json(self, name, status=200, **parameters):
        answer, body = fetch(self.viewer, f"/api/{name}?{urlencode(parameters)}")
        assert answer.status == status, body
        return json.loads(body)


def fetch(viewer, path, method="GET", **headers):
    connection = http.client.HTTPConnection(urlsplit(viewer.url).netloc, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body
