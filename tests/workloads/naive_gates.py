"""The routing rules again, token by token in plain Python floats: what the tests hold the vectorised ones to."""

import math


def softmax(row):
    top = max(row)
    powers = [math.exp(value - top) for value in row]
    return [power / sum(powers) for power in powers]


def best(values, number=1):
    """Indices of the largest values, ties to the lowest index."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:number]


def balance(probs, chosen, experts, choices):
    """(E / choices) sum_e P_e f_e of rows of probabilities and lists of chosen experts."""
    tokens = len(probs)
    if tokens == 0:
        return 0.0
    mean = [sum(row[e] for row in probs) / tokens for e in range(experts)]
    share = [sum(row.count(e) for row in chosen) / tokens for e in range(experts)]
    return experts / choices * sum(p * f for p, f in zip(mean, share))


def ktop1(rows, top_k):
    """Experts, weights and loss of every token: the best expert of each prototype."""
    chosen, weights, losses = [], [], []
    experts = len(rows[0]) if rows else top_k
    size = experts // top_k
    inside = [[softmax(row[i * size : (i + 1) * size]) for i in range(top_k)] for row in rows]
    for row in inside:
        picks = [best(probs)[0] for probs in row]
        chosen.append([i * size + pick for i, pick in enumerate(picks)])
        weights.append([probs[pick] for probs, pick in zip(row, picks)])
    for i in range(top_k):
        probs = [row[i] for row in inside]
        losses.append(balance(probs, [[row[i] - i * size] for row in chosen], size, 1))
    return chosen, weights, {"balance": sum(losses) / top_k}


def sam(rows, top_k, groups):
    """The group with the largest probability, the k best experts in it."""
    chosen, weights, alignment = [], [], 0.0
    probs = [softmax(row) for row in rows]
    experts = len(rows[0]) if rows else 1
    members = [[e for e in range(experts) if e * groups // experts == g] for g in range(groups)]
    for row in probs:
        group = members[best([sum(row[e] for e in own) for own in members])[0]]
        picks = sorted(group, key=lambda e: (-row[e], e))[:top_k]
        chosen.append(picks)
        weights.append([row[e] for e in picks])
        outside = [e for e in range(experts) if e not in group]
        alignment += sum(max(0.0, row[e] - row[picks[-1]]) for e in outside) / len(rows)
    return chosen, weights, {"balance": balance(probs, chosen, experts, top_k), "alignment": alignment}


def dense_to_sparse(rows, temperature, threshold, hard=False):
    """Every expert whose tempered share is above the threshold; one list of E places a token, None where it is not."""
    shares = [softmax([value / temperature for value in row]) for row in rows]
    chosen, weights = [], []
    for row in shares:
        used = best(row) if hard else [e for e in range(len(row)) if row[e] > threshold]
        chosen.append(used)
        weights.append([row[e] for e in used])
    loss = 0.0
    if rows:
        experts, tokens = len(rows[0]), len(rows)
        pairs = [pair for used, own in zip(chosen, weights) for pair in zip(used, own)]
        mean = [sum(w for u, w in pairs if u == e) / tokens for e in range(experts)]
        share = [sum(e in used for used in chosen) / tokens for e in range(experts)]
        loss = experts * sum(w * f for w, f in zip(mean, share)) / sum(share)
    return chosen, weights, {"balance": loss}


def kept(chosen, capacity, choice_major=True):
    """Whether each route finds a slot, in arrival order, and which."""
    choices = max((len(row) for row in chosen), default=0)
    queue = [(t, j) for t in range(len(chosen)) for j in range(choices)]
    if choice_major:
        queue.sort(key=lambda place: (place[1], place[0]))
    taken, slots = {}, {}
    for t, j in queue:
        if j < len(chosen[t]):
            expert = chosen[t][j]
            if taken.get(expert, 0) < capacity:
                slots[t, j] = taken.get(expert, 0)
                taken[expert] = slots[t, j] + 1
    return slots
