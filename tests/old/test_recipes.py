"""The recipes of docs/recipes.md, as a reader would follow them."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import MODULES, ROOT

RECIPES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', (ROOT / "docs/recipes.md").read_text(), re.S))
RUN = "--mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 8 --total-timesteps 2000 --run-name a"


def test_keep_the_best(tmp_path):
    source = (ROOT / "rppo_lstm.py").read_text()
    where = "        bar.update(steps)\n"
    assert source.count(where) == 1
    (tmp_path / "mine.py").write_text(source.replace(where, RECIPES["keep the best"] + where))
    subprocess.run([sys.executable, "mine.py", *RUN.split()], cwd=tmp_path, check=True, capture_output=True)
    saved = MODULES["rppo_lstm"].load(str(tmp_path / "runs/a/best.pt"))
    assert saved["args"]["run_name"] == "a" and len(saved["agent"]) > 5


def test_onnx_export_threads_the_state(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    (tmp_path / "export_onnx.py").write_text(RECIPES["export_onnx.py"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (str(ROOT / "rppo_lstm.py"), *RUN.split()), ("export_onnx.py", "runs/a", "agent.onnx"):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    module = MODULES["rppo_lstm"]
    args = module.Args(**module.load(str(tmp_path / "runs/a"))["args"])
    envs = module.make_envs(args, 1)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, args)
    module.load(str(tmp_path / "runs/a"), agent)
    session = runtime.InferenceSession(str(tmp_path / "agent.onnx"))
    state = agent.initial_state(1)
    exported = state.numpy()
    for obs in np.random.default_rng(0).normal(size=(40, 1, 4)).astype(np.float32):
        action, state = agent.predict(obs, state, deterministic=True)
        exported_action, exported = session.run(None, {"obs": obs, "state": exported})
        assert exported_action[0, 0] == action[0]
        assert np.abs(exported - state.numpy()).max() <= 1e-5
