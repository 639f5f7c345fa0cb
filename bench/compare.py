import sys, time, json, statistics

sys.path.insert(0, "bench")
import handwritten as H
import flowrl as fl


def flow(seed, updates):
    s = fl.PPOSettings(envs=32, fragment=128, batch=4096, epochs=10, minibatch=128, lr=H.LR, value_clip=0.2, entropy=0.01)
    out = []
    with fl.run(fl.ppo("CartPole-v1", s), seed=seed) as run:
        last = time.perf_counter()
        for row in run:
            now = time.perf_counter()
            out.append(now - last)
            last = now
            if row["row"] == updates:
                break
    return out


R = []
for i in range(6):
    a = statistics.median(flow(i, 30)[3:])
    b = statistics.median(H.train(i, 30)[3:])
    R.append(b / a)
    print(f"flowrl {4096 / a:,.0f} hand {4096 / b:,.0f} ratio {b / a:.3f}", flush=True)
print("median", statistics.median(R))
