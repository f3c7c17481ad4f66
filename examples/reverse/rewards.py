"""What a reversed word is worth: one point if it is right, and, if it has as many letters, a share of one for each in its place."""


def exact_match(prompt: str, completion: str, row: dict) -> float:
    return float(completion == row["answer"])


def letters(prompt: str, completion: str, row: dict) -> float:
    answer = row["answer"]
    if len(completion) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)
