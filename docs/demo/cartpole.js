/* An agent that balances CartPole without seeing velocities, in the page.

   A page of the site shows it by three lines, with paths relative to the page:

       <link rel="stylesheet" href="demo/cartpole.css">
       <div class="cartpole">What stands here without JavaScript: a picture, a sentence.</div>
       <script src="demo/cartpole.js" defer></script>

   agent.json lies beside this file: weights, a probe and recorded episodes, written by export.py.
   Nothing else is loaded. The order below: physics, agent, what is drawn, what can be pressed.
   tests/test_demo.py compares physics and agent with Gymnasium and PyTorch. */
"use strict";
(() => {
  const HERE = document.currentScript.src;
  const TAU = 0.02; // seconds between steps
  const PUSH = 0.5; // what a push adds to the pole's angular velocity, in rad/s
  const SHOWN = 200; // time steps in the charts

  // ---- CartPole-v1, as in Gymnasium -----------------------------------------------------------

  /** state [x, x', theta, theta'], a force in newtons -> the state 0.02 s later. */
  function physics([x, xDot, theta, thetaDot], force) {
    const cos = Math.cos(theta), sin = Math.sin(theta);
    const temp = (force + 0.05 * (thetaDot * thetaDot) * sin) / 1.1;
    const thetaAcc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - (0.1 * (cos * cos)) / 1.1));
    const xAcc = temp - (0.05 * thetaAcc * cos) / 1.1;
    return [
      x + TAU * xDot, xDot + TAU * xAcc, theta + TAU * thetaDot, thetaDot + TAU * thetaAcc,
    ];
  }

  const over = ([x, , theta]) => Math.abs(x) > 2.4 || Math.abs(theta) > (12 * 2 * Math.PI) / 360;
  const force = (action) => (action === 1 ? 10 : -10);
  const start = () => Array.from({ length: 4 }, () => 0.1 * Math.random() - 0.05);

  // ---- The agent: rppo_lstm.py's, in float32 like PyTorch --------------------------------------

  /** A matrix or vector of agent.json: 16-bit multiples of a power of two -> floats. */
  function decode({ data, step }) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float32Array.from(
      { length: bytes.length / 2 }, (_, k) => view.getInt16(2 * k, true) * step,
    );
  }

  /** bias + weight x; weight has a row for each output. */
  function affine(weight, bias, x) {
    return bias.map((sum, row) => {
      for (let k = 0; k < x.length; k++) sum += weight[row * x.length + k] * x[k];
      return sum;
    });
  }

  const sigmoid = (x) => 1 / (1 + Math.exp(-x));

  class Agent {
    constructor(weights) {
      this.weights = {};
      for (const name in weights) this.weights[name] = decode(weights[name]);
      this.size = weights["lstm.cell.weight_hh"].shape[1]; // H
      this.forget();
    }

    /** The state at the start of an episode, and after every final step. */
    forget() {
      this.h = new Float32Array(this.size);
      this.c = new Float32Array(this.size);
    }

    /** A state of the environment -> what the agent sees of it: no velocities. */
    see([x, , theta]) {
      return Float32Array.of(x, 0, theta, 0);
    }

    /** One step: obs (4,) -> the most probable action. h and c move on. */
    act(obs) {
      const w = this.weights, H = this.size;
      const x = affine(w["encoder.0.weight"], w["encoder.0.bias"], obs).map(Math.tanh);
      const ofX = affine(w["lstm.cell.weight_ih"], w["lstm.cell.bias_ih"], x); // (4 H,)
      const gates = affine(w["lstm.cell.weight_hh"], w["lstm.cell.bias_hh"], this.h);
      gates.forEach((_, k) => (gates[k] += ofX[k]));
      const h = new Float32Array(H), c = new Float32Array(H);
      for (let k = 0; k < H; k++) {
        const i = sigmoid(gates[k]), f = sigmoid(gates[H + k]); // input and forget gate
        const g = Math.tanh(gates[2 * H + k]), o = sigmoid(gates[3 * H + k]); // new, output gate
        c[k] = f * this.c[k] + i * g;
        h[k] = o * Math.tanh(c[k]);
      }
      this.h = h;
      this.c = c;
      const [left, right] = affine(w["actor.weight"], w["actor.bias"], h);
      return right > left ? 1 : 0;
    }
  }

  /** The linear probe: h -> the cart's and the pole's velocity. */
  function read({ weight, bias }, h) {
    return weight.map((row, j) => row.reduce((sum, w, k) => sum + w * h[k], bias[j]));
  }

  // ---- What is drawn --------------------------------------------------------------------------

  const chart = (name, unit) => `
    <figure class="cp-chart">
      <figcaption>${name} <span>${unit}</span></figcaption>
      <svg viewBox="0 -30 ${SHOWN} 60" preserveAspectRatio="none" role="img"
           aria-label="${name}, read from the memory and true, over the last four seconds">
        <path class="cp-zero" d="M0 0H${SHOWN}"/>
        <path class="cp-cleared"/><path class="cp-pushed"/>
        <path class="cp-true"/><path class="cp-read"/>
      </svg>
    </figure>`;

  const input = (name, unit, hidden) => `
    <div class="cp-input${hidden ? " cp-hidden" : ""}">
      <dt>${name} <span>${unit}</span></dt><dd><b>0</b>${hidden ? '<span class="cp-truth"></span>' : ""}</dd>
    </div>`;

  const PAGE = `
    <div class="cp-stage" tabindex="0" role="group"
         aria-label="The cart and its pole. Left and right arrow push the pole, space pauses.">
      <div class="cp-head">
        <p class="cp-steps"><b>0</b> <span>steps</span></p>
        <dl class="cp-best">
          <div><dt>best with memory</dt><dd>–</dd></div>
          <div><dt>best without</dt><dd>–</dd></div>
        </dl>
      </div>
      <svg role="img" aria-label="A cart balances a pole on a track.">
        <path class="cp-track" d="M-2.4 .06V-.06M2.4 .06V-.06M-2.4 0H2.4M0 0V.04"/>
        <g class="cp-cart">
          <path class="cp-limit" d="M0 -.24L-.2495 -1.414M0 -.24L.2495 -1.414"/>
          <rect x="-.27" y="-.27" width=".54" height=".21" rx=".045"/>
          <circle class="cp-wheel" cx="-.16" cy="-.055" r=".055"/>
          <circle class="cp-wheel" cx=".16" cy="-.055" r=".055"/>
          <g class="cp-pole">
            <path d="M0 0V-1"/>
            <path class="cp-arrow" d="M.1 -.93h.3m-.1 -.08l.1 .08l-.1 .08"/>
            <path class="cp-arrow" d="M-.1 -.93h-.3m.1 -.08l-.1 .08l.1 .08"/>
          </g>
          <circle class="cp-axle" cx="0" cy="-.24" r=".035"/>
        </g>
      </svg>
    </div>
    <div class="cp-controls">
      <button type="button" data-do="play">Play</button>
      <button type="button" data-do="clear">Clear memory</button>
      <button type="button" data-do="left" aria-label="Push the pole left">← Push</button>
      <button type="button" data-do="right" aria-label="Push the pole right">Push →</button>
      <label><input type="checkbox" data-do="always"> Clear memory at every step</label>
      <label><input type="checkbox" data-do="show" checked> Show true velocities</label>
    </div>
    <p class="cp-status" role="status">Push the pole, or clear the agent’s memory.
      On the picture, the arrow keys push, and the space bar pauses.</p>
    <div class="cp-panels">
      <section>
        <p class="cp-title">What it sees</p>
        <dl class="cp-obs">
          ${input("cart’s position", "m")}${input("cart’s velocity", "m/s", true)}
          ${input("pole’s angle", "rad")}${input("pole’s velocity", "rad/s", true)}
        </dl>
      </section>
      <section>
        <p class="cp-title">What it remembers</p>
        <div class="cp-memory" role="img"></div>
        <p class="cp-note">h, the LSTM’s <span class="cp-size"></span> outputs:
          <span class="cp-minus">negative</span>, <span class="cp-plus">positive</span>.
          The further right, the more a unit rises with the pole’s velocity.</p>
      </section>
      <section>
        <p class="cp-title">What can be read from it</p>
        ${chart("cart’s velocity", "m/s")}${chart("pole’s velocity", "rad/s")}
        <p class="cp-note"><span class="cp-key-read">Read from h</span> by a fixed linear
          map<span class="cp-key-true">; <b>true</b></span>. R² is <span class="cp-r2"></span> on
          episodes that the map wasn’t fitted to. Vertical lines: dashed, a push; solid, memory
          cleared.</p>
      </section>
    </div>`;

  const RANGES = [1.2, 1.6]; // of the charts, in m/s and rad/s

  /** Numbers in the order of time, or null where an episode begins -> a path. */
  function line(values, range) {
    let pen = "M";
    return values.map((value, k) => {
      if (value === null) {
        pen = "M";
        return "";
      }
      const y = Math.max(-29, Math.min(29, (-29 * value) / range));
      const point = `${pen}${k + SHOWN - values.length} ${y.toFixed(1)}`;
      pen = "L";
      return point;
    }).join("");
  }

  class Demo {
    constructor(root, { weights, probe }) {
      this.agent = new Agent(weights);
      this.probe = probe;
      this.root = root;
      this.one = (selector) => root.querySelector(selector);
      this.all = (selector) => [...root.querySelectorAll(selector)];
      this.one(".cp-memory").innerHTML = "<i></i>".repeat(this.agent.size);
      this.cells = this.all(".cp-memory i");
      this.one(".cp-memory").ariaLabel = `The LSTM’s ${this.agent.size} outputs as colours`;
      this.one(".cp-size").textContent = this.agent.size;
      this.one(".cp-r2").textContent = probe.r2.map((r2) => r2.toFixed(2)).join(" and ");
      this.charts = this.all(".cp-chart");
      this.best = [0, 0]; // with memory, and without
      this.history = []; // of the charts
      this.always = false; // clear the memory at every step
      this.playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
      this.visible = false;
      this.narrow = matchMedia("(max-width: 760px)");
      this.reset();
      this.listen();
      this.show();
      this.draw();
      this.schedule();
    }

    reset(state = start()) {
      this.state = state;
      this.agent.forget();
      this.h = this.agent.h; // what is drawn
      this.steps = 0; // since the start, or since the memory was switched on or off
      this.fallen = 0; // time steps since the end
      this.history.push(null);
    }

    /** 0.02 s of the world. */
    step() {
      if (this.fallen) {
        this.drop();
        return;
      }
      const action = this.agent.act(this.agent.see(this.state));
      this.h = this.agent.h;
      if (this.always) this.agent.forget();
      this.history.push({ read: read(this.probe, this.h), true: [this.state[1], this.state[3]] });
      this.history.splice(0, this.history.length - SHOWN);
      this.state = physics(this.state, force(action));
      this.steps++;
      const mode = this.always ? 1 : 0;
      this.best[mode] = Math.max(this.best[mode], this.steps);
      if (over(this.state)) {
        const what = Math.abs(this.state[0]) > 2.4 ? "The cart left the track" : "The pole fell";
        this.say(`${what} after ${this.steps} steps${this.always ? " without memory" : ""}.`);
        this.fallen = 1;
      }
    }

    /** After the end: nobody drives, the pole drops; a second later a new episode begins. */
    drop() {
      const [x, xDot, theta, thetaDot] = physics(this.state, 0);
      const lies = Math.abs(theta) > Math.PI / 2, away = Math.abs(x) > 2.5;
      this.state = [
        away ? 2.5 * Math.sign(x) : x, away ? 0 : xDot,
        lies ? (Math.PI / 2) * Math.sign(theta) : theta, lies ? 0 : thetaDot,
      ];
      if (this.fallen++ > 50) this.reset();
    }

    draw() {
      const [x, xDot, theta, thetaDot] = this.state;
      const degrees = (theta * 180) / Math.PI;
      // A narrow screen shows a part of the track, and moves along before the cart leaves it.
      const width = this.narrow.matches ? 3.4 : 5.5;
      const centre = Math.min(Math.max(0, Math.abs(x) + 0.7 - width / 2), 2.75 - width / 2);
      const left = Math.sign(x) * centre - width / 2;
      this.one(".cp-stage svg").setAttribute("viewBox", `${left} -1.5 ${width} 1.68`);
      this.one(".cp-cart").setAttribute("transform", `translate(${x} 0)`);
      this.one(".cp-pole").setAttribute("transform", `translate(0 -.24) rotate(${degrees})`);
      this.one(".cp-stage").classList.toggle("cp-over", this.fallen > 0);
      this.probe.order.forEach((unit, k) => {
        const style = this.cells[k].style;
        style.setProperty("--size", Math.abs(this.h[unit]).toFixed(2));
        style.setProperty("--colour", `var(--cp-${this.h[unit] < 0 ? "minus" : "plus"})`);
      });
      const shift = SHOWN - this.history.length;
      const marks = (name) =>
        this.history.map((row, k) => (row?.[name] ? `M${k + shift} -30V30` : "")).join("");
      this.charts.forEach((chart, j) => {
        const set = (name, d) => chart.querySelector(name).setAttribute("d", d);
        for (const name of ["read", "true"]) {
          set(`.cp-${name}`, line(this.history.map((row) => row && row[name][j]), RANGES[j]));
        }
        set(".cp-cleared", marks("cleared"));
        set(".cp-pushed", marks("pushed"));
      });
      if (this.frame && !this.fallen && this.steps % 5) return; // slow enough to be read
      const numbers = this.all(".cp-obs b"), truths = this.all(".cp-truth");
      numbers[0].textContent = signed(x);
      numbers[2].textContent = signed(theta);
      truths[0].textContent = `true ${signed(xDot)}`;
      truths[1].textContent = `true ${signed(thetaDot)}`;
      this.one(".cp-steps b").textContent = this.steps;
      this.all(".cp-best dd").forEach((dd, k) => (dd.textContent = this.best[k] || "–"));
    }

    say(what) {
      this.one(".cp-status").textContent = what;
    }

    // ---- What can be pressed ------------------------------------------------------------------

    play() {
      this.playing = !this.playing;
      this.schedule();
    }

    push(side) {
      if (this.fallen) return;
      this.state[3] += side * PUSH;
      this.mark("pushed");
      this.say(`You pushed the pole ${side < 0 ? "left" : "right"}.`);
      const arrow = this.all(".cp-arrow")[side < 0 ? 1 : 0];
      arrow.animate([{ opacity: 1 }, { opacity: 0 }], 600);
      this.draw();
    }

    clear() {
      this.agent.forget();
      this.h = this.agent.h;
      this.mark("cleared");
      this.say("Memory cleared: the agent has to find out the velocities again.");
      this.draw();
    }

    mark(what) {
      const last = this.history.at(-1);
      if (last) last[what] = true;
    }

    clearAlways(on) {
      this.always = on;
      this.steps = 0;
      this.say(on ? "Memory is cleared at every step." : "The agent remembers.");
    }

    show() {
      this.root.classList.toggle("cp-no-truth", !this.one("[data-do=show]").checked);
    }

    listen() {
      const actions = {
        play: () => this.play(), clear: () => this.clear(),
        left: () => this.push(-1), right: () => this.push(1),
      };
      for (const button of this.all("button")) button.onclick = actions[button.dataset.do];
      this.one("[data-do=always]").onchange = (event) => this.clearAlways(event.target.checked);
      this.one("[data-do=show]").onchange = () => this.show();
      this.root.addEventListener("keydown", (event) => {
        const onStage = event.target === this.one(".cp-stage");
        const name = { ArrowLeft: "left", ArrowRight: "right", " ": onStage && "play" }[event.key];
        if (!name || event.ctrlKey || event.altKey || event.metaKey) return;
        event.preventDefault(); // space would scroll the page
        actions[name]();
      });
      const seen = new IntersectionObserver((entries) => {
        this.visible = entries.at(-1).isIntersecting;
        this.schedule();
      });
      seen.observe(this.one(".cp-stage"));
      document.addEventListener("visibilitychange", () => this.schedule());
    }

    /** Runs while it is to play and can be seen. */
    schedule() {
      this.one("[data-do=play]").textContent = this.playing ? "Pause" : "Play";
      const run = this.playing && this.visible && !document.hidden;
      if (run && !this.frame) {
        this.owed = 0; // milliseconds of the world
        this.last = performance.now();
        this.frame = requestAnimationFrame((now) => this.tick(now));
      } else if (!run) {
        cancelAnimationFrame(this.frame);
        this.frame = null;
        this.draw();
      }
    }

    tick(now) {
      this.owed += Math.min(100, Math.max(0, now - this.last));
      this.last = now;
      for (; this.owed >= 1000 * TAU; this.owed -= 1000 * TAU) this.step();
      this.draw();
      this.frame = requestAnimationFrame((next) => this.tick(next));
    }
  }

  const signed = (x) => x.toFixed(2).replace("-", "−");

  async function begin(root) {
    const before = root.innerHTML;
    root.innerHTML = PAGE;
    try {
      const answer = await fetch(new URL("agent.json", HERE));
      if (!answer.ok) throw new Error(answer.statusText);
      const contents = await answer.json();
      root.demo = new Demo(root, contents);
    } catch (error) {
      console.error("The agent could not be loaded.", error);
      root.innerHTML = before;
    }
  }

  window.cartpole = { Agent, Demo, physics, over, force, read };
  document.querySelectorAll(".cartpole").forEach(begin);
})();
