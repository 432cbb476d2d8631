"""An S3 store over HTTP: moto's, asked for one thing at a time.

moto looks for an object and writes it in two steps, so that of two threads that may create one
both can: requests that follow each other make the steps one, as they are in S3. Signatures are
checked by moto, too. `fail` makes faults, as of the Hub's stand-ins.
"""

import json
import threading
import uuid

from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.authorization import enable_iam_authentication
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from werkzeug.test import Client

from tests.hub_server import Answer, HttpServer

EVERYTHING = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}


class S3Server(HttpServer):
    """Serve one bucket over HTTP until the `with` block ends; `options` are s3fs's for it."""

    bucket = "documents"

    def __init__(self):
        super().__init__()
        self._app, self._one_at_a_time = Client(create_backend_app("s3")), threading.Lock()
        user = f"user-{uuid.uuid4().hex}"
        accounts = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
        accounts.create_user("us-east-1", user)
        policy = {"Version": "2012-10-17", "Statement": [EVERYTHING]}
        accounts.put_user_policy(user, "all", json.dumps(policy))
        key = accounts.create_access_key(user)
        self.options = {
            "key": key.access_key_id,
            "secret": key.secret_access_key,
            "endpoint_url": self.url,
        }
        self._authentication = enable_iam_authentication()

        self.environment = {
            "AWS_ACCESS_KEY_ID": key.access_key_id,
            "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
            "AWS_ENDPOINT_URL": self.url,
        }

    def __enter__(self):
        self._authentication.__enter__()
        self._store = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._store.create_bucket(self.bucket, "us-east-1")
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._authentication.__exit__(*error)
        self._store.reset()

    def remove(self, prefix):
        """Lose the objects whose keys begin so."""
        keys = self._store.get_bucket(self.bucket).keys
        for key in [key for key in keys if key.startswith(prefix)]:
            keys.pop(key)

    def _answer(self, call):
        headers = [(name, value) for name, value in call.headers.items()]
        with self._one_at_a_time:
            answer = self._app.open(
                call.target, base_url=self.url, method=call.method, headers=headers, data=call.body
            )
        return Answer(answer.status_code, answer.data, dict(answer.headers))
