"""TD3 in NumPy and float64, written from the equations alone: it decides what TD3 is.

It shares nothing with the package: gradients are derived by hand, parameters are lists of (W, b) with
W (in, out), or (W, b, gain, shift) where a layer is normalised, and one agent is one agent. Nothing here is fast and
nothing needs to be.
"""

import numpy as np


def forward(layers, x):
    """The output of a ReLU network and the input of each of its layers."""
    inputs = []
    for i, (w, b, *norm) in enumerate(layers):
        inputs.append(x)
        x = x @ w + b
        if norm:
            x = standard(x)[0] * norm[0] + norm[1]
        if i + 1 < len(layers):
            x = np.maximum(x, 0.0)
    return x, inputs


def backward(layers, inputs, d):
    """The gradients of each (W, b), and of the network's input, from the gradient `d` of its output."""
    gradients = []
    for i in reversed(range(len(layers))):
        w, b, *norm = layers[i]
        of_norm = ()
        if norm:
            z, deviation = standard(inputs[i] @ w + b)
            of_norm = (d * z).sum(0), d.sum(0)
            d = d * norm[0]
            d = (d - d.mean(1, keepdims=True) - z * (d * z).mean(1, keepdims=True)) / deviation
        gradients.insert(0, (inputs[i].T @ d, d.sum(0), *of_norm))
        d = d @ w.T
        if i > 0:
            d = d * (inputs[i] > 0)
    return gradients, d


class Eye:
    """Convolutions, 3 × 3 and two steps apart, over stacks of frames; then a layer that is normalised and squashed."""

    def __init__(self, layers, stack, height, width, channels, shared):
        self.layers, self.frames, self.shared = layers, (stack, height, width, channels), shared
        self.pixels = stack * height * width * channels

    def forward(self, eye, pixels):
        """Features, and what `backward` needs: the patches of each convolution, and the rest."""
        stack, height, width, channels = self.frames
        x = pixels.reshape(-1, stack, height, width, channels).transpose(0, 1, 4, 2, 3)
        x = x.reshape(len(pixels), stack * channels, height, width) / 255 - 0.5
        seen = []
        for w, b in eye[:-1]:
            patches = np.stack([np.stack([x[under(x, y, z)] for z in range(3)]) for y in range(3)])
            seen.append((patches, x))
            x = np.einsum("yzbchw,cyzo->bohw", patches, w.reshape(-1, 3, 3, w.shape[1])) + b[:, None, None]
            x = np.maximum(x, 0)
        flat = x.reshape(len(pixels), -1)
        z, deviation = standard(flat @ eye[-1][0] + eye[-1][1])
        return np.tanh(z), (seen, x, flat, z, deviation)

    def backward(self, eye, cache, d):
        seen, x, flat, z, deviation = cache
        d = d * (1 - np.tanh(z) ** 2)
        d = (d - d.mean(1, keepdims=True) - z * (d * z).mean(1, keepdims=True)) / deviation
        gradients = [(flat.T @ d, d.sum(0))]
        d = (d @ eye[-1][0].T).reshape(x.shape)
        for i in reversed(range(len(eye) - 1)):
            w, _ = eye[i]
            patches, before = seen[i]
            d = d * (x > 0)
            of_w = np.einsum("yzbchw,bohw->cyzo", patches, d).reshape(w.shape)
            gradients.insert(0, (of_w, d.sum((0, 2, 3))))
            of_patches = np.einsum("bohw,cyzo->yzbchw", d, w.reshape(-1, 3, 3, w.shape[1]))
            x, d = before, np.zeros_like(before)
            for y in range(3):
                for z in range(3):
                    d[under(d, y, z)] += of_patches[y, z]
        return gradients


def under(x, y, z):
    """Where pixel (y, z) of a 3 × 3 kernel lies, wherever the kernel is put, two steps apart."""
    height, width = ((side - 3) // 2 + 1 for side in x.shape[2:])
    return np.s_[:, :, y : y + 2 * height - 1 : 2, z : z + 2 * width - 1 : 2]


def standard(x):
    """Each row with mean 0 and deviation 1, and what it was divided by."""
    deviation = np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return (x - x.mean(1, keepdims=True)) / deviation, deviation


class Adam:
    def __init__(self, layers, lr):
        self.lr, self.t = lr, 0
        self.m = [tuple(np.zeros_like(p) for p in layer) for layer in layers]
        self.v = [tuple(np.zeros_like(p) for p in layer) for layer in layers]

    def step(self, layers, gradients):
        self.t += 1
        stepped = []
        for i, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
            self.m[i] = tuple(0.9 * m + 0.1 * g for m, g in zip(self.m[i], gradient, strict=True))
            self.v[i] = tuple(0.999 * v + 0.001 * g**2 for v, g in zip(self.v[i], gradient, strict=True))
            m_hat = [m / (1 - 0.9**self.t) for m in self.m[i]]
            v_hat = [v / (1 - 0.999**self.t) for v in self.v[i]]
            stepped.append(
                tuple(p - self.lr * m / (np.sqrt(v) + 1e-8) for p, m, v in zip(layer, m_hat, v_hat, strict=True))
            )
        return stepped


class Oracle:
    """One TD3 agent: `actor`, two `critics`, and the targets of all three.

    With an `eye`, the first of each one's layers are an eye's. If it is `shared` there is one, which learns from both
    critics, and the actor looks through it as it is.
    """

    def __init__(self, actor, critics, *, actor_lr, critic_lr, max_action=1.0, eye=None):
        self.eye = eye
        self.actor, self.critics = actor, list(critics)
        self.target_actor, self.target_critics = list(actor), list(critics)
        self.actor_adam = Adam(actor, actor_lr)
        self.critic_adams = [Adam(critic, critic_lr) for critic in critics]
        self.max_action = max_action
        self.updates = 0

    def forward(self, layers, x):
        if self.eye is None:
            return forward(layers, x)
        eye, head = layers[: self.eye.layers], layers[self.eye.layers :]
        features, seen = self.eye.forward(eye, x[:, : self.eye.pixels])
        out, inputs = forward(head, np.concatenate([features, x[:, self.eye.pixels :]], 1))
        return out, (seen, inputs)

    def backward(self, layers, cache, d):
        """With an eye, the gradient of the input is that of what is not in the images."""
        if self.eye is None:
            return backward(layers, cache, d)
        eye, head = layers[: self.eye.layers], layers[self.eye.layers :]
        gradients, d = backward(head, cache[1], d)
        features = eye[-1][0].shape[1]
        return self.eye.backward(eye, cache[0], d[:, :features]) + gradients, d[:, features:]

    def update(self, s, a, r, s2, done, noise, *, gamma, tau, sigma, clip, delay):
        self.updates += 1
        n = len(r)
        a2 = self.max_action * np.tanh(self.forward(self.target_actor, s2)[0])
        a2 = np.clip(a2 + np.clip(sigma * noise, -clip, clip), -self.max_action, self.max_action)
        q2 = [self.forward(critic, np.concatenate([s2, a2], 1))[0][:, 0] for critic in self.target_critics]
        y = r + gamma * (1 - done) * np.minimum(q2[0], q2[1])

        both = []
        for critic in self.critics:
            q, cache = self.forward(critic, np.concatenate([s, a], 1))
            both.append(self.backward(critic, cache, (2 / n) * (q[:, 0] - y)[:, None])[0])
        shared = self.eye.layers if self.eye and self.eye.shared else 0
        eye = [tuple(map(sum, zip(*layers, strict=True))) for layers in zip(*both, strict=True)][:shared]
        for i in range(2):
            self.critics[i] = self.critic_adams[i].step(self.critics[i], eye + both[i][shared:])

        if self.updates % delay == 0:
            self.actor = self.critics[0][:shared] + self.actor[shared:]
            z, actor_cache = self.forward(self.actor, s)
            action = self.max_action * np.tanh(z)
            _, critic_cache = self.forward(self.critics[0], np.concatenate([s, action], 1))
            _, d = self.backward(self.critics[0], critic_cache, np.full((n, 1), -1 / n))
            d_action = d[:, -action.shape[1] :]
            gradients, _ = self.backward(self.actor, actor_cache, d_action * self.max_action * (1 - np.tanh(z) ** 2))
            nothing = [tuple(0 * g for g in layer) for layer in gradients[:shared]]
            self.actor = self.actor_adam.step(self.actor, nothing + gradients[shared:])
            self.target_actor = mixed(self.target_actor, self.actor, tau)
            for i in range(2):
                self.target_critics[i] = mixed(self.target_critics[i], self.critics[i], tau)

    def tensors(self):
        """Every number it holds, under the names and in the shapes that the package uses for one seed."""
        named = {
            **actor_tensors("actor", self.actor),
            **actor_tensors("target_actor", self.target_actor),
            **critic_tensors("critic", self.critics),
            **critic_tensors("target_critic", self.target_critics),
            **actor_tensors("actor_adam.m", self.actor_adam.m),
            **actor_tensors("actor_adam.v", self.actor_adam.v),
            **critic_tensors("critic_adam.m", [adam.m for adam in self.critic_adams]),
            **critic_tensors("critic_adam.v", [adam.v for adam in self.critic_adams]),
        }
        if self.eye:
            named = {of_eye(name, self.eye): tensor for name, tensor in named.items()}
            for name in [
                name for name in named if self.eye.shared and "critic" in name.split(".")[0] and "encoder" in name
            ]:
                named[name] = named[name][:1]
        named["actor_adam.count"] = np.array([self.actor_adam.t])
        named["critic_adam.count"] = np.array([self.updates])
        return named


def of_eye(name, eye):
    """actor.w1 -> actor.eye.w1 or actor.critic.eye.w1, critic.w3 -> critic.w1: the layers of an eye come first."""
    *whose, tensor = name.split(".")
    number = int(tensor[1:])
    if number > eye.layers:
        return ".".join([*whose, f"{tensor[0]}{number - eye.layers}"])
    borrowed = ["critic"] if eye.shared and "actor" in whose[0] else []
    return ".".join([*whose, *borrowed, "encoder", tensor])


def mixed(target, online, tau):
    return [
        tuple((1 - tau) * t + tau * p for t, p in zip(old, new, strict=True))
        for old, new in zip(target, online, strict=True)
    ]


def actor_tensors(prefix, layers):
    named = {}
    for i, (w, *rows) in enumerate(layers, start=1):
        named[f"{prefix}.w{i}"] = w[None]
        named |= {f"{prefix}.{name}{i}": row[None, None] for name, row in zip(NAMES, rows, strict=False)}
    return named


def critic_tensors(prefix, twins):
    first, second = (actor_tensors(prefix, layers) for layers in twins)
    return {name: np.stack([first[name], second[name]]) for name in first}


NAMES = ("b", "gain", "shift")  # of a layer's rows, as the package calls them


def layers_of(parameters, *index):
    """A package's parameters as a list of (W, b) in float64; `index` picks twin and seed."""
    as_array = {name: tensor.detach().double().numpy()[index] for name, tensor in parameters.items()}
    depth = sum(name.startswith("w") for name in as_array)
    rows = [
        [as_array[f"{name}{i}"][0].copy() for name in NAMES if f"{name}{i}" in as_array] for i in range(1, depth + 1)
    ]
    return [(as_array[f"w{i}"].copy(), *rows[i - 1]) for i in range(1, depth + 1)]
