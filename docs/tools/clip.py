"""Films two agents of masked CartPole side by side: one with memory, and its control without.

python rppo_lstm.py --env-id CartPole-v1 --mask-velocity --run-name memory
python rppo_lstm.py --env-id CartPole-v1 --mask-velocity --ablate-memory --run-name control
python docs/tools/clip.py runs/memory runs/control docs/img/cartpole-memory.gif
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rppo_lstm

SEED, STEPS = 7, 300  # 20 ms each
SIZE, FINE = (300, 210), 3  # of a half, in pixels; frames are drawn FINE times as large
INK, CART, POLE, TRACK, PAGE = "#1f2937", "#334155", "#d9580b", "#94a3b8", "#ffffff"


def film(run_dir: str) -> list[tuple[float, float, int, str]]:
    """Position, angle, number of the attempt and a line about it, at each of STEPS steps."""
    args = rppo_lstm.Args(**rppo_lstm.load(run_dir)["args"])
    envs = rppo_lstm.make_envs(args, 1)
    agent = rppo_lstm.Agent(envs, args)
    rppo_lstm.load(run_dir, agent)
    frames, attempt, step, state = [], 1, 1, None
    obs, info = envs.reset(seed=SEED)
    while len(frames) < STEPS:
        frames.append((float(obs[0, 0]), float(obs[0, 2]), attempt, f"step {step}"))
        action, state = agent.predict(obs, info, state)
        obs, _, terminated, truncated, info = envs.step(action)
        step += 1
        if (terminated | truncated)[0]:
            end = float(obs[0, 0]), float(obs[0, 2]), attempt, f"fell after {step - 1} steps"
            frames += [end] * 20  # 0.4 s to see it
            obs, info = envs.reset()
            attempt, step, state = attempt + 1, 1, None
    return frames[:STEPS]


def picture(title: str, position: float, angle: float, attempt: int, line: str) -> Image.Image:
    """A half of a frame. CartPole's track is 4.8 wide, its pole 1 long."""
    width, height = SIZE[0] * FINE, SIZE[1] * FINE
    image = Image.new("RGB", (width, height), PAGE)
    draw = ImageDraw.Draw(image)
    scale, ground = width / 4.8, height * 0.83
    x = width / 2 + position * scale
    draw.line([(0, ground), (width, ground)], TRACK, FINE)
    tip = x + np.sin(angle) * scale, ground - 12 * FINE - np.cos(angle) * scale
    draw.rounded_rectangle(
        [x - 24 * FINE, ground - 20 * FINE, x + 24 * FINE, ground - 2 * FINE], 4 * FINE, CART
    )
    draw.line([(x, ground - 12 * FINE), tip], POLE, 8 * FINE)
    for end in (x, ground - 12 * FINE), tip:
        draw.circle(end, 4 * FINE, POLE)
    bold, plain = (ImageFont.load_default(size * FINE) for size in (15, 13))
    draw.text((12 * FINE, 8 * FINE), title, INK, bold)
    colour = POLE if line.startswith("fell") else "#5b6472"
    draw.text((12 * FINE, 28 * FINE), f"attempt {attempt}: {line}", colour, plain)
    return image.resize(SIZE, Image.Resampling.LANCZOS)


def main(memory: str, control: str, out: str) -> None:
    halves = [film(memory), film(control)]
    frames = []
    for pair in list(zip(*halves))[::2]:  # every second step: 25 frames a second
        frame = Image.new("RGB", (2 * SIZE[0] + 2, SIZE[1]), TRACK)
        for i, (title, values) in enumerate(zip(("with memory", "without memory"), pair)):
            frame.paste(picture(title, *values), (i * (SIZE[0] + 2), 0))
        frames.append(frame)
    palette = frames[0].quantize(32)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=40, loop=0, optimize=True)
    for name, half in zip(("with memory", "without"), halves):
        falls = half[-1][2] - 1
        print(f"{name}: {falls} falls in {STEPS} steps")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python docs/tools/clip.py RUN_WITH_MEMORY RUN_WITHOUT OUT")
    main(*sys.argv[1:])
