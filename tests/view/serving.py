"""A server of runs in a thread, and requests to it."""

import http.client
import json
import threading
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

from verl_mg.view.run import Run
from verl_mg.view.server import Viewer


class Served:
    """A server of runs; called, it asks for JSON and returns the answer."""

    def __init__(self, folders):
        self.viewer = Viewer([Run(folder) for folder in folders])

    def __call__(self, name, status=200, **parameters):
        answer, body = fetch(self.viewer, f"/api/{name}?{urlencode(parameters)}")
        assert answer.status == status, body
        return json.loads(body)


@contextmanager
def serving(*folders):
    served = Served(folders)
    thread = threading.Thread(target=served.viewer.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield served
    finally:
        served.viewer.shutdown()
        served.viewer.server_close()
        thread.join()


def fetch(viewer, path, method="GET", **headers):
    connection = http.client.HTTPConnection(urlsplit(viewer.url).netloc, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body
