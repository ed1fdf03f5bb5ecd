"""A character-level language model: one layer of gated recurrent units, with its gradient written out by hand.

For each character `x[t]` the model keeps a state `h[t]` of `hidden` numbers and predicts the next character:

    z = sigmoid(Wz[x] + h Uz + bz)               how much of the old state stays
    r = sigmoid(Wr[x] + h Ur + br)               how much of the old state the candidate may see
    c = tanh(Wc[x] + r * (h Uc + bc))            the candidate
    h = z * h + (1 - z) * c
    p = softmax(h V + d)                         the next character

`W` is a table with one row per character, so the embedding and the input projection are one look-up. The three gates
lie side by side in `W`, `U` and `b`: one matrix product per character serves all of them.
"""

from __future__ import annotations

import numpy as np

Parameters = dict  # name -> float array; gradients and Adam's moments have the same shape


def initial_parameters(vocabulary: int, hidden: int, rng: np.random.Generator) -> Parameters:
    """Small random weights. The bias of `z` starts at 1, so that a fresh model remembers before it has learned to."""
    recurrent = [np.linalg.qr(rng.standard_normal((hidden, hidden)))[0] for _ in range(3)]
    bias = np.zeros(3 * hidden)
    bias[:hidden] = 1.0
    weights = {
        "W": rng.normal(0, 0.3, (vocabulary, 3 * hidden)),
        "U": np.concatenate(recurrent, axis=1),
        "b": bias,
        "V": rng.normal(0, 1 / np.sqrt(hidden), (hidden, vocabulary)),
        "d": np.zeros(vocabulary),
    }
    return {name: values.astype(np.float32) for name, values in weights.items()}


def loss_and_gradients(
    weights: Parameters, inputs: np.ndarray, targets: np.ndarray, keep: np.ndarray | None = None
) -> tuple[float, Parameters]:
    """Mean cross-entropy in nats per character, and its gradient by back-propagation through time.

    inputs, targets: character numbers, shape (time, batch); every sequence starts from an empty state.
    keep: dropout mask on the state where it is read out, shape (time, batch, hidden), already scaled by 1 / (1 - rate).
    """
    steps, batch = inputs.shape
    hidden = weights["U"].shape[0]
    dtype = weights["U"].dtype

    states = np.zeros((steps + 1, batch, hidden), dtype)
    gates = np.empty((steps, batch, 3 * hidden), dtype)  # z, r and c after their non-linearities
    memories = np.empty((steps, batch, hidden), dtype)  # h Uc + bc: what r lets through
    projected = weights["W"][inputs]
    for t in range(steps):
        states[t + 1] = _advance(weights, projected[t], states[t], gates[t], memories[t])

    read = states[1:] if keep is None else states[1:] * keep
    logits = read @ weights["V"] + weights["d"]
    log_p = log_softmax(logits)
    picked = np.take_along_axis(log_p, targets[..., None], axis=-1)
    loss = float(-picked.mean(dtype=np.float64))

    # d loss / d logits is (p - one-hot target) / count.
    d_logits = np.exp(log_p)
    np.put_along_axis(d_logits, targets[..., None], np.exp(picked) - 1, axis=-1)
    d_logits /= steps * batch
    d_read = d_logits @ weights["V"].T
    d_states = d_read if keep is None else d_read * keep

    # Backwards in time: d_gates holds the gradient before each gate's non-linearity; for c also what reaches h Uc + bc.
    d_gates = np.empty_like(gates)
    d_memories = np.empty_like(memories)
    d_h = np.zeros((batch, hidden), dtype)
    transposed = np.ascontiguousarray(weights["U"].T)
    d_recurrent = np.empty((batch, 3 * hidden), dtype)
    for t in reversed(range(steps)):
        z, r, c = np.split(gates[t], 3, axis=1)
        d_h += d_states[t]
        d_z = d_h * (states[t] - c) * z * (1 - z)
        d_c = d_h * (1 - z) * (1 - c * c)
        d_r = d_c * memories[t] * r * (1 - r)
        d_memories[t] = d_c * r
        d_gates[t] = np.concatenate((d_z, d_r, d_c), axis=1)
        d_recurrent[:, : 2 * hidden] = d_gates[t, :, : 2 * hidden]
        d_recurrent[:, 2 * hidden :] = d_memories[t]
        d_h = d_h * z + d_recurrent @ transposed

    flat = steps * batch
    d_input = d_gates.reshape(flat, -1)
    d_hidden = np.concatenate((d_gates[..., : 2 * hidden], d_memories), axis=-1).reshape(flat, -1)
    d_bias = d_hidden.sum(axis=0)
    gradients = {
        "W": _sum_rows(inputs.reshape(flat), d_input, len(weights["W"])),
        "U": states[:-1].reshape(flat, hidden).T @ d_hidden,
        "b": d_bias,
        "V": read.reshape(flat, hidden).T @ d_logits.reshape(flat, -1),
        "d": d_logits.reshape(flat, -1).sum(axis=0),
    }
    return loss, gradients


def sequence_loss(weights: Parameters, text: np.ndarray, lanes: int) -> float:
    """Mean cross-entropy over a long text, read in `lanes` parallel pieces with the state carried to each one's end."""
    length = (len(text) - 1) // lanes
    starts = np.arange(lanes) * length
    state = np.zeros((lanes, weights["U"].shape[0]), weights["U"].dtype)
    total = 0.0
    for t in range(length):
        state = _advance(weights, weights["W"][text[starts + t]], state)
        log_p = log_softmax(state @ weights["V"] + weights["d"])
        total -= float(log_p[np.arange(lanes), text[starts + t + 1]].sum(dtype=np.float64))
    return total / (length * lanes)


def sample(
    weights: Parameters, prompt: list[int], length: int, temperature: float, rng: np.random.Generator
) -> list[int]:
    """Write on after `prompt`. A temperature below 1 prefers what the model is sure of."""
    state = np.zeros((1, weights["U"].shape[0]), weights["U"].dtype)
    written: list[int] = []
    for position in range(len(prompt) + length):
        current = prompt[position] if position < len(prompt) else written[-1]
        state = _advance(weights, weights["W"][[current]], state)
        if position >= len(prompt) - 1 and len(written) < length:
            logits = (state @ weights["V"] + weights["d"])[0].astype(np.float64) / temperature
            p = np.exp(log_softmax(logits))
            written.append(int(rng.choice(len(p), p=p / p.sum())))
    return written


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def adam(
    weights: Parameters, gradients: Parameters, first: Parameters, second: Parameters, step: int, learning_rate: float
) -> None:
    """One step of Adam, in place, on gradients clipped to a global norm of 1. `step` counts from 1.

    Raises FloatingPointError, and changes nothing, when the gradient is not a number.
    """
    norm = np.sqrt(sum(float((g * g).sum(dtype=np.float64)) for g in gradients.values()))
    if not np.isfinite(norm):
        raise FloatingPointError(f"the gradient of step {step} is not a number")
    scale = 1.0 / max(1.0, norm)
    rate = learning_rate * np.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    for name, gradient in gradients.items():
        gradient = gradient * scale
        first[name] += 0.1 * (gradient - first[name])
        second[name] += 0.01 * (gradient * gradient - second[name])
        weights[name] -= (rate * first[name] / (np.sqrt(second[name]) + 1e-8)).astype(weights[name].dtype)


def _advance(
    weights: Parameters,
    projected: np.ndarray,
    state: np.ndarray,
    gates: np.ndarray | None = None,
    memory: np.ndarray | None = None,
) -> np.ndarray:
    """One character: the next state; `gates` and `memory`, when given, keep what the gradient needs."""
    hidden = state.shape[1]
    recurrent = state @ weights["U"] + weights["b"]
    zr = 0.5 + 0.5 * np.tanh(
        0.5 * (projected[:, : 2 * hidden] + recurrent[:, : 2 * hidden])
    )  # sigmoid, never overflows
    z, r = zr[:, :hidden], zr[:, hidden:]
    c = np.tanh(projected[:, 2 * hidden :] + r * recurrent[:, 2 * hidden :])
    if gates is not None:
        gates[:, : 2 * hidden], gates[:, 2 * hidden :] = zr, c
        memory[...] = recurrent[:, 2 * hidden :]
    return z * state + (1 - z) * c


def _sum_rows(rows: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Add `values` up by row number: the transpose of a table look-up, as one product with a one-hot matrix."""
    one_hot = np.zeros((count, len(rows)), values.dtype)
    one_hot[rows, np.arange(len(rows))] = 1
    return one_hot @ values
