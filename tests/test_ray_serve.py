"""Replicas by Ray Serve: what the words of the command mean, and a cluster of this machine that answers as a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from litchi.errors import UsageError
from litchi.serve.ray_serve import build, share


def test_words_of_the_command():
    assert share({}) == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0.0}, "num_replicas": 1}
    assert share({"replicas": "4", "gpus": "0.5"})["ray_actor_options"]["num_gpus"] == 0.5
    scaled = share({"replicas": "auto", "most": "3"})
    assert scaled["autoscaling_config"]["max_replicas"] == 3 and "num_replicas" not in scaled
    for words, said in (({"target": "x", "gpu": "1"}, "gpu is no word"), ({}, "target is not given")):
        with pytest.raises(UsageError, match=said):
            build(words)
    with pytest.raises(UsageError, match="many"):
        share({"replicas": "many"})


ASK = """
import json, sys, time, urllib.error, urllib.request
import ray
from ray import serve
from litchi.serve.ray_serve import build

port = int(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
serve.start(http_options={"port": port})
serve.run(build({"target": "builtin:tiny", "overrides": "task=rerank", "cpus": "0.5"}), blocking=False)
body = json.dumps({"query": "red dress", "documents": ["red silk dress", "blue jeans"]}).encode()
for path, sent in (("/health", None), ("/v1/rerank", body), ("/v1/rerank", b"{}")):
    while True:
        head = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", sent, head)) as reply:
                print(json.dumps([reply.status, json.load(reply)]))
                break
        except urllib.error.HTTPError as error:
            if error.code != 503:
                print(json.dumps([error.code, json.load(error)]))
                break
        time.sleep(1)
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_answers_as_a_server_does(tmp_path):
    """Skipped where Ray Serve is not installed."""
    pytest.importorskip("ray.serve", exc_type=ImportError)
    import socket

    from litchi.serve.pairs import PairScorer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "ask.py"
    script.write_text(textwrap.dedent(ASK))
    words = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    env, command = {**os.environ, **words}, [sys.executable, script, str(port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, env=env, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    health, ranked, refused = (json.loads(line) for line in lines)
    assert health[0] == ranked[0] == 200 and refused[0] == 400
    found = {result["index"]: result["logit"] for result in ranked[1]["results"]}
    own = PairScorer("builtin:tiny", ["task=rerank"]).score(
        [("red dress", "red silk dress"), ("red dress", "blue jeans")]
    )
    assert [found[0], found[1]] == pytest.approx(own, abs=1e-5)
