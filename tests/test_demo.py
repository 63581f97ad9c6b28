"""The agent in the page, docs/demo: in Chromium, and against Gymnasium and PyTorch.

The home page, which shows it, is built and served here. On Debian: apt-get install chromium chromium-driver.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import ROOT

sys.path.insert(0, str(ROOT / "docs/demo"))
import export  # noqa: E402

AGENT = json.loads(export.AGENT.read_text())
FLAGS = "headless no-sandbox disable-gpu disable-dev-shm-usage disable-background-networking"


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


class Page:
    """The home page in Chromium, whose demo JavaScript has as `demo`."""

    def __init__(self, driver, url: str):
        self.driver, self.url = driver, url

    def open(self, width=1280, scheme="light", motion="no-preference"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(self.url)
        if self.run("return localStorage.length"):  # the theme remembers a scheme
            self.run("localStorage.clear()")
            self.driver.get(self.url)
        self.until("document.querySelector('.cartpole')?.demo")
        self.run("window.demo = document.querySelector('.cartpole').demo")

    def stand_still(self):
        """Until it is played, in a state of its own."""
        self.run("if (demo.playing) demo.play(); demo.reset([0.01, 0.02, 0.03, 0.04])")

    def run(self, script: str, *args):
        """What the script returns; a promise is awaited."""
        return self.driver.execute_script(script, *args)

    def until(self, condition: str):
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 8, 0.02).until(lambda _: self.run(f"return {condition}"))

    def find(self, css: str) -> list:
        return self.driver.find_elements("css selector", css)

    def click(self, name: str):
        [button] = self.find(f"[data-do={name}]")
        button.click()

    def press(self, key: str):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The page, not yet opened."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("Chromium isn't installed: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("demo")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS.split(), f"user-data-dir={folder}/profile"]:
        options.add_argument(f"--{flag}")
    handler = functools.partial(Handler, directory=str(build_page(folder)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with webdriver.Chrome(options, webdriver.ChromeService(chromedriver)) as driver:
            yield Page(driver, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


@pytest.fixture
def page(browser):
    """The page at 1,280 pixels; the demo stands still until it is played."""
    browser.open()
    browser.stand_still()
    return browser


def test_recorded_episodes_are_pytorchs():
    """agent.json is what export.py writes: its weights play its episodes, in Gymnasium."""
    agent = export.make_agent(AGENT["weights"])
    assert export.AGENT.stat().st_size < 300_000
    for seed, episode in enumerate(AGENT["episodes"]):
        again = export.record(agent, seed)
        assert again["actions"] == episode["actions"] and len(again["actions"]) == 500
        np.testing.assert_allclose(again["end"], episode["end"], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(again["start"], episode["start"])


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
        rows.push([state, action, [...agent.h], cartpole.read(probe, agent.h)]);
        state = cartpole.physics(state, cartpole.force(action));
    }
    return rows;
"""


def test_an_episode_in_the_page_is_gymnasiums_and_pytorchs(page):
    """Step by step, from its first state alone: states, actions, h, and what is read from h."""
    agent, probe = export.make_agent(AGENT["weights"]), AGENT["probe"]
    env = gym.make("CartPole-v1").unwrapped
    for episode in AGENT["episodes"]:
        env.reset()
        env.state, lstm_state = np.array(episode["start"]), None
        for state, action, h, velocities in page.run(PLAY, episode["start"]):
            np.testing.assert_allclose(state, env.state, rtol=0, atol=1e-9)
            obs = np.float32(env.state)
            played, lstm_state = agent.predict(export.masked(obs[None]), lstm_state)
            assert action == played[0]
            np.testing.assert_allclose(h, lstm_state[0, 0], rtol=0, atol=1e-5)
            expected = np.array(probe["weight"]) @ lstm_state[0, 0].numpy() + probe["bias"]
            np.testing.assert_allclose(velocities, expected, rtol=0, atol=1e-4)
            env.step(action)


def test_the_end_is_gymnasiums(page):
    env = gym.make("CartPole-v1").unwrapped
    states = np.random.default_rng(0).uniform(-1, 1, (200, 4)) * [2.6, 2, 0.23, 2]
    ends, following = [], []
    for state in states:
        env.reset()
        env.state = state
        ends.append(env.step(1)[2])
        following.append(env.state)
    assert 20 < sum(ends) < 180
    js = "return arguments[0].map(s => cartpole.physics(s, 10)).map(s => [s, cartpole.over(s)])"
    found, over = zip(*page.run(js, states.tolist()))
    np.testing.assert_allclose(found, following, rtol=0, atol=1e-12)
    assert list(over) == ends


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
    assert [int(best.text) for best in page.find(".cp-best dd")] == [500, max(without)]


def test_a_push_is_survived_and_a_fall_ends(page):
    js = """
        demo.reset([0.01, 0.02, 0.03, 0.04]);
        for (let t = 0; t < 100; t++) demo.step();
        for (let k = 0; k < arguments[0]; k++) demo.push(1);
        for (let t = 0; t < 20; t++) demo.step();
        return demo.fallen > 0;"""
    assert page.run(js, 1) is False
    assert page.run(js, 6) is True
    assert "pole fell" in page.find(".cp-status")[0].text
    page.run("for (let t = 0; t < 60; t++) demo.step()")
    assert page.run("return [demo.fallen, demo.steps < 60]") == [0, True]


def test_keyboard(page):
    """Tab reaches the picture, then the buttons and switches, in the order in which they stand."""
    from selenium.webdriver import Keys

    page.run("document.querySelector('.cp-stage').focus()")
    velocity = page.run("return demo.state[3]")
    for key, pushes in (Keys.RIGHT, 1), (Keys.LEFT, 0), (Keys.LEFT, -1):
        page.press(key)
        assert page.run("return demo.state[3]") == pytest.approx(velocity + pushes * export.PUSH)
    page.press(Keys.SPACE)
    assert page.run("return [demo.playing, scrollY]") == [True, 0]
    page.press(Keys.SPACE)
    assert page.run("return demo.playing") is False
    focused = []
    for _ in range(6):
        page.press(Keys.TAB)
        focused.append(page.run("return document.activeElement.dataset.do"))
    assert focused == ["play", "clear", "left", "right", "always", "show"]
    for shown in False, True:
        page.press(Keys.SPACE)
        assert page.find(".cp-true")[0].is_displayed() is shown


def test_buttons(page):
    page.run("for (let t = 0; t < 20; t++) demo.step()")
    assert page.run("return demo.agent.h.some(x => x !== 0)")
    page.click("clear")
    assert page.run("return [...demo.agent.h, ...demo.agent.c].every(x => x === 0)")
    velocity = page.run("return demo.state[3]")
    for name, pushes in ("right", 1), ("left", 0):
        page.click(name)
        assert page.run("return demo.state[3]") == pytest.approx(velocity + pushes * export.PUSH)
    for cleared in True, False:
        page.click("always")
        page.run("demo.step()")
        assert page.run("return demo.agent.h.every(x => x === 0)") is cleared
        assert page.run("return demo.h.some(x => x !== 0)")
    page.click("play")
    page.until("demo.steps > 22")
    page.click("play")
    steps = page.run("return demo.steps")
    assert page.run("return new Promise(r => setTimeout(() => r(demo.steps), 200))") == steps


LATER = """
    const steps = demo.steps, began = performance.now();
    return new Promise(r => setTimeout(() =>
        r([demo.steps - steps, (performance.now() - began) / 20]), 300))"""


def test_runs_only_where_it_is_seen(browser):
    """At 50 steps a second; not below the screen's edge, nor where motion is unwanted."""
    browser.open()
    browser.until("demo.steps > 5")
    steps, at_most = browser.run(LATER)
    assert steps < at_most + 5
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.until("!demo.visible")
    assert browser.run(LATER)[0] == 0
    seen = browser.run("return demo.steps")
    browser.run("scrollTo(0, 0)")
    browser.until(f"demo.steps > {seen}")
    browser.open(motion="reduce")
    browser.until("demo.visible")
    assert browser.run(LATER)[0] == 0
    browser.click("play")
    browser.until("demo.steps > 5")


COLOURS = """
    const ground = (element) => {
        const colour = element ? getComputedStyle(element).backgroundColor : "rgb(255, 255, 255)";
        return colour.startsWith("rgb(") ? colour : ground(element.parentElement);
    };
    const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    return [...document.querySelectorAll(".cartpole *")].filter(hasText)
        .map((e) => [e.innerText, getComputedStyle(e).color, ground(e)]);
"""


def luminance(colour: str) -> float:
    """Of "rgb(0, 128, 255)", as the accessibility guidelines (WCAG 2) define it."""
    x = np.array(re.findall(r"[\d.]+", colour)[:3], float) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ [
        0.2126,
        0.7152,
        0.0722,
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_layout(browser, width, scheme):
    """No wider than the screen; text is readable; all that can be used has a name and a size."""
    browser.open(width=width, scheme=scheme)
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
    texts = browser.run(COLOURS)
    assert len(texts) > 15
    for text, colour, ground in texts:
        dark, light = sorted([luminance(colour), luminance(ground)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text
    for element in browser.find(".cartpole :is(button, label)"):
        assert element.size["height"] >= 24, element.text
    usable = browser.find(".cartpole :is([role], button, input)")
    assert all(element.accessible_name for element in usable if element.aria_role != "status")
    roles = Counter(element.aria_role for element in usable)
    assert roles == {"image": 4, "button": 4, "checkbox": 2, "group": 1, "status": 1}


def test_nothing_from_elsewhere(browser):
    """Files of the site only; and where agent.json is missing, the page keeps what stood there."""
    browser.open()
    names = browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert f"{browser.url}demo/agent.json" in names
    assert [name for name in names if not name.startswith(browser.url)] == []
    browser.driver.execute_cdp_cmd("Network.enable", {})
    try:
        browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*agent.json"]})
        browser.driver.get(browser.url)
        browser.until("!document.querySelector('.cp-stage')")
        assert browser.run("return document.querySelector('.cartpole img').naturalWidth > 0")
    finally:
        browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
