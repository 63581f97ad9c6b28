"""The agent in the page, docs/demo: in Chromium, and against Gymnasium and PyTorch.

The home page, which shows it, is built and served here, and driven by ChromeDriver over HTTP, as
the WebDriver standard has it. On Debian: apt-get install chromium chromium-driver.
"""

import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT

DEMO = ROOT / "docs/demo"
sys.path.insert(0, str(DEMO))
import export  # noqa: E402

AGENT = json.loads(export.AGENT.read_text())
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
]  # fmt: skip
KEYS = {"left": "\ue012", "right": "\ue014", "tab": "\ue004", "space": " "}


class Browser:
    """Chromium, by the commands of the WebDriver standard."""

    def __init__(self, port: int, profile: Path):
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={profile}"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        session = self.call("/session", capabilities={"alwaysMatch": wanted})
        self.url += f"/session/{session['sessionId']}"

    def call(self, path: str, method: str = "POST", **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def run(self, script: str, *args):
        """What the script returns; a promise is awaited."""
        return self.call("/execute/sync", script=script, args=args)

    def until(self, condition: str):
        """Waits until the JavaScript expression holds."""
        wait = """const end = performance.now() + 8000;
            const look = (yes) => CONDITION ? yes(true) : performance.now() > end ? yes(false)
                : setTimeout(look, 20, yes);
            return new Promise(look);"""
        assert self.run(wait.replace("CONDITION", condition)), f"waited in vain for {condition}"

    def press(self, key: str):
        down_up = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self.call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": down_up}])

    def cdp(self, command: str, **params):
        return self.call("/goog/cdp/execute", cmd=command, params=params)

    def emulate(self, width: int, scheme: str = "light", motion: str = "no-preference"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        named = [{"name": name, "value": value} for name, value in features.items()]
        self.cdp("Emulation.setEmulatedMedia", features=named)

    def open(self, url: str, **how):
        self.emulate(**{"width": 1280, **how})
        self.call("/url", url=url)
        if self.run("return localStorage.length"):  # the theme remembers a scheme
            self.run("localStorage.clear()")
            self.call("/url", url=url)
        self.until("document.querySelector('.cartpole')?.demo")

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("/screenshot", "GET")))


def build_page(folder: Path) -> Path:
    """A site of the home page alone, whose links to other pages lead nowhere -> its folder."""
    config = (ROOT / "zensical.toml").read_text()
    config = re.sub(r"^nav = \[.*?^\]\n", "", config, flags=re.M | re.S)
    (folder / "zensical.toml").write_text(config)
    for name in "demo", "img", "stylesheets":
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    shutil.copy(ROOT / "docs/index.md", folder / "docs")
    command = [sys.executable, "-m", "zensical", "build", "-f", str(folder / "zensical.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serving(site: Path):
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def browsing(folder: Path):
    """A browser in `folder`, and the address of the page."""
    with serving(build_page(folder)) as address:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        browser = None
        try:
            assert driver.stdout is not None
            started = (re.search(r"started successfully on port (\d+)", s) for s in driver.stdout)
            port = next(match[1] for match in started if match)
            browser = Browser(int(port), folder / "profile")
            yield browser, address
        finally:
            if browser:
                browser.call("", "DELETE")
            driver.terminate()
            driver.wait()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A browser, and a function that opens the page in it."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("Chromium isn't installed: apt-get install chromium chromium-driver")
    pytest.importorskip("zensical")
    with browsing(tmp_path_factory.mktemp("demo")) as (browser, address):
        yield browser, functools.partial(browser.open, address)


@pytest.fixture
def page(opened):
    """The page at 1,280 pixels; the demo stands still until it is played."""
    browser, open_page = opened
    open_page()
    browser.run("window.demo = document.querySelector('.cartpole').demo")
    browser.run("if (demo.playing) demo.play(); demo.reset([0.01, 0.02, 0.03, 0.04])")
    return browser


def test_recorded_episodes_are_pytorchs():
    """agent.json is what export.py writes: its weights play its episodes, in Gymnasium."""
    agent = export.make_agent(AGENT["weights"])
    assert export.AGENT.stat().st_size < 300_000
    for seed, episode in enumerate(AGENT["episodes"]):
        again = export.record(agent, seed)
        assert again["actions"] == episode["actions"]
        np.testing.assert_allclose(again["end"], episode["end"], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(again["start"], episode["start"])
        assert len(episode["actions"]) == 500


def test_probe_reads_the_velocities():
    """On episodes that it hasn't seen, the probe of agent.json explains what agent.json says."""
    agent, probe = export.make_agent(AGENT["weights"]), AGENT["probe"]
    h, y, first = export.disturbed(agent, 20, 300, seed=1)
    guess = h[first] @ np.array(probe["weight"]).T + probe["bias"]
    r2 = 1 - ((y[first] - guess) ** 2).mean(0) / y[first].var(0)
    np.testing.assert_allclose(r2, probe["r2"], rtol=0, atol=0.05)
    assert min(probe["r2"]) > 0.8
    assert sorted(probe["order"]) == list(range(128))


def test_weights_survive_the_file():
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    error = (export.decode(export.encode(weight)) - weight).abs().max()
    assert error <= 2.0**-14  # the largest weight is between 2 and 4: half a step of 2 ** -13


PLAY = """
    const {agent, probe} = demo, rows = [];
    agent.forget();
    for (let t = 0, state = arguments[0]; t < 500; t++) {
        const action = agent.act(agent.see(state));
        rows.push([action, [...agent.h].slice(0, 8), cartpole.read(probe, agent.h), state]);
        state = cartpole.physics(state, cartpole.force(action));
    }
    return rows;
"""


def test_actions_are_pytorchs(page):
    """The recorded episodes, of 500 steps in Gymnasium, from their first states alone."""
    for episode in AGENT["episodes"]:
        rows = page.run(PLAY, episode["start"])
        assert "".join(str(row[0]) for row in rows) == episode["actions"]


def test_states_h_and_what_is_read(page):
    """The numbers of an episode, step by step, against Gymnasium and PyTorch."""
    agent, probe, start = (
        export.make_agent(AGENT["weights"]),
        AGENT["probe"],
        [0.04, 0.03, -0.02, 0.01],
    )
    env, lstm_state = gym.make("CartPole-v1"), None
    env.reset()
    env.unwrapped.state, obs = np.array(start), np.float32(start)
    for action, some_h, velocities, state in page.run(PLAY, start):
        np.testing.assert_allclose(state, env.unwrapped.state, rtol=0, atol=1e-9)
        played, lstm_state = agent.predict(export.masked(obs[None]), lstm_state)
        assert played[0] == action
        h = lstm_state[0, 0].numpy()
        np.testing.assert_allclose(some_h, h[:8], rtol=0, atol=1e-5)
        expected = np.array(probe["weight"]) @ h + probe["bias"]
        np.testing.assert_allclose(velocities, expected, rtol=0, atol=1e-4)
        obs = env.step(action)[0]


def test_the_end_is_gymnasiums(page):
    env = gym.make("CartPole-v1").unwrapped
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (200, 4)) * [2.6, 2, 0.23, 2]
    ends, nexts = [], []
    for state in states:
        env.reset()
        env.state = state
        _, _, terminated, _, _ = env.step(1)
        ends.append(terminated)
        nexts.append(env.state)
    assert 20 < sum(ends) < 180
    js = "return arguments[0].map(s => cartpole.physics(s, 10)).map(s => [s, cartpole.over(s)])"
    states_js, ends_js = zip(*page.run(js, states.tolist()))
    np.testing.assert_allclose(states_js, nexts, rtol=0, atol=1e-12)
    assert list(ends_js) == ends


def test_memory_is_what_balances(page):
    """Ten starts: 500 steps with memory; fewer than 100 if it is cleared at every step."""
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (10, 4)).tolist()
    js = """
        demo.clearAlways(arguments[1]);
        return arguments[0].map((state) => {
            demo.reset(state);
            while (!demo.fallen && demo.steps < 500) demo.step();
            return demo.steps;
        });"""
    assert page.run(js, starts, False) == [500] * 10
    without = page.run(js, starts, True)
    assert 8 <= min(without) and max(without) < 100
    page.run("demo.draw()")
    assert page.run("return [...document.querySelectorAll('.cp-best dd')].map(e => +e.innerText)") == [
        500, max(without),
    ]  # fmt: skip


def test_a_push_is_survived_and_a_fall_ends(page):
    js = """
        demo.reset([0.01, 0.02, 0.03, 0.04]);
        for (let t = 0; t < 100; t++) demo.step();
        for (let k = 0; k < arguments[0]; k++) demo.push(1);
        for (let t = 0; t < 20; t++) demo.step();
        return demo.fallen > 0;"""
    assert page.run(js, 1) is False
    assert page.run(js, 6) is True
    assert "pole fell" in page.run("return document.querySelector('.cp-status').innerText")
    page.run("for (let t = 0; t < 60; t++) demo.step()")
    assert page.run("return [demo.fallen, demo.steps < 60]") == [0, True]


def test_keyboard(page):
    """Tab reaches the picture, then the buttons and switches, in the order in which they stand."""
    page.run("document.querySelector('.cp-stage').focus()")
    velocity = page.run("return demo.state[3]")
    page.press("right")
    assert page.run("return demo.state[3]") == pytest.approx(velocity + export.PUSH)
    page.press("left")
    page.press("left")
    assert page.run("return demo.state[3]") == pytest.approx(velocity - export.PUSH)
    page.press("space")
    assert page.run("return [demo.playing, scrollY]") == [True, 0]
    page.press("space")
    assert page.run("return demo.playing") is False
    focused = []
    for _ in range(6):
        page.press("tab")
        focused.append(page.run("return document.activeElement.dataset.do"))
    assert focused == ["play", "clear", "left", "right", "always", "show"]
    page.press("space")
    shown = "return getComputedStyle(document.querySelector('.cp-true')).display !== 'none'"
    assert page.run(shown) is False
    page.press("space")
    assert page.run(shown) is True


def test_buttons(page):
    click = "document.querySelector(`[data-do=${arguments[0]}]`).click()"
    page.run("for (let t = 0; t < 20; t++) demo.step()")
    assert page.run("return demo.agent.h.some(x => x !== 0)")
    page.run(click, "clear")
    assert page.run("return [...demo.agent.h, ...demo.agent.c].every(x => x === 0)")
    velocity = page.run("return demo.state[3]")
    page.run(click, "right")
    assert page.run("return demo.state[3]") == pytest.approx(velocity + export.PUSH)
    page.run(click, "left")
    assert page.run("return demo.state[3]") == pytest.approx(velocity)
    page.run(click, "always")
    page.run("demo.step()")
    assert (
        page.run("return [demo.agent.h.every(x => x === 0), demo.h.some(x => x !== 0)]")
        == [True] * 2
    )
    page.run(click, "always")
    page.run("demo.step()")
    assert page.run("return demo.agent.h.some(x => x !== 0)")
    page.run(click, "play")
    page.until("demo.steps > 20")
    page.run(click, "play")
    steps = page.run("return demo.steps")
    assert page.run("return new Promise(r => setTimeout(() => r(demo.steps), 200))") == steps


def test_runs_only_where_it_is_seen(opened):
    """At 50 steps a second; not below the screen's edge, nor where motion is unwanted."""
    browser, open_page = opened
    later = """const demo = document.querySelector('.cartpole').demo;
        const steps = demo.steps, began = performance.now();
        return new Promise(r => setTimeout(() =>
            r([demo.steps - steps, (performance.now() - began) / 20]), 300))"""
    open_page()
    browser.until("document.querySelector('.cartpole').demo.steps > 5")
    steps, at_most = browser.run(later)
    assert steps < at_most + 5
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.until("!document.querySelector('.cartpole').demo.visible")
    assert browser.run(later)[0] == 0
    seen = browser.run("return document.querySelector('.cartpole').demo.steps")
    browser.run("scrollTo(0, 0)")
    browser.until(f"document.querySelector('.cartpole').demo.steps > {seen}")
    open_page(motion="reduce")
    browser.until("document.querySelector('.cartpole').demo.visible")
    assert browser.run(later)[0] == 0
    browser.run("document.querySelector('[data-do=play]').click()")
    browser.until("document.querySelector('.cartpole').demo.steps > 5")


CONTRASTS = """
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const [r, g, b] = parse(colour).map((x) => x / 255)
            .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        const [, , , alpha = 1] = parse(colour);
        return alpha === 1 ? colour : element === document.documentElement ? 'rgb(255, 255, 255)'
            : ground(element.parentElement);
    };
    const rows = {};
    for (const element of document.querySelectorAll('.cartpole *')) {
        if (![...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
        const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
        rows[element.innerText] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }
    return rows;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_layout(opened, width, scheme):
    """No wider than the screen; text is readable; all that can be used has a name and a size."""
    browser, open_page = opened
    open_page(width=width, scheme=scheme)
    dark = browser.run("return document.body.dataset.mdColorScheme") == "slate"
    assert dark == (scheme == "dark")
    size = "return [document.documentElement.scrollWidth, innerWidth, visualViewport.scale]"
    wide, screen, scale = browser.run(size)
    assert wide <= screen == width and scale == 1
    overflowing = """const edge = document.querySelector('.cartpole').getBoundingClientRect().right;
        return [...document.querySelectorAll('.cartpole :is(p, dl, dt, dd, button, label, figure)')]
            .filter((e) => e.getBoundingClientRect().right > edge + 1 || e.scrollWidth > e.clientWidth + 1)
            .map((e) => e.className || e.innerText)"""
    assert browser.run(overflowing) == []
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 15
    assert {what: ratio for what, ratio in contrasts.items() if ratio < 4.5} == {}
    small = """return [...document.querySelectorAll('.cartpole :is(button, label)')]
        .filter((e) => e.getBoundingClientRect().height < 24).map((e) => e.innerText)"""
    assert browser.run(small) == []
    document = browser.cdp("DOM.getDocument")["root"]["nodeId"]
    demo = browser.cdp("DOM.querySelector", nodeId=document, selector=".cartpole")["nodeId"]
    for role, count in {"image": 4, "button": 4, "checkbox": 2, "group": 1, "status": 1}.items():
        nodes = browser.cdp("Accessibility.queryAXTree", nodeId=demo, role=role)["nodes"]
        assert len(nodes) == count, role
        assert role == "status" or all(node["name"]["value"].strip() for node in nodes), role


def test_nothing_from_elsewhere(opened):
    """Files of the site only; and where agent.json is missing, the page keeps what stood there."""
    browser, open_page = opened
    open_page()
    names = browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    origin = browser.run("return origin + '/'")
    assert f"{origin}demo/agent.json" in names
    assert [name for name in names if not name.startswith(origin)] == []
    browser.cdp("Network.enable")
    browser.cdp("Network.setBlockedURLs", urls=["*agent.json"])
    try:
        browser.call("/url", url=origin)
        browser.until("!document.querySelector('.cp-stage')")
        assert browser.run("return document.querySelector('.cartpole img').naturalWidth > 0")
    finally:
        browser.cdp("Network.setBlockedURLs", urls=[])
