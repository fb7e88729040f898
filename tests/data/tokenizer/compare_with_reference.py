"""Random strings with the ids and the decoded text that the Python package `tokenizers` gives them.

    python compare_with_reference.py tokenizer.json COUNT out.json SEED        (tokenizers 0.23.3, Python 3.11)

Writes a list of {text, ids[, decoded, skip]}; compare with Tokenizer::encode(text) and Tokenizer::decode(ids, {skip}).
"""
import json
import random
import sys

from tokenizers import Tokenizer

path, count, out, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
tokenizer = Tokenizer.from_file(path)
rng = random.Random(seed)
added = [token["content"] for token in json.load(open(path))["added_tokens"]]
POOLS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", " ", "  \t\n\r\n", "\n\n\n", "\r\n", "'s't're've'll'D'M",
    "éàüñçÅ", "e\u0301a\u0308o\u0302\u0323c\u0327", "你好世界今天天气很", "ひらがなカタカナが\u3099", "한국어텍스트",
    "\u1112\u1161\u11ab", "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลกน้ำ", "مرحبا بالعالم", "שָׁלוֹם", "🙂👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽",
    "ⅧⅣ²½٣४", "\u2028\u2029\u00a0\u3000\u200b\ufeff\u1680\u2003\u180e",
    "\u212b\u2126\u0344\u0958\ufb1d\u2000\uf900", "!@#$%^&*()_+-=[]{}|;:\",./<>?`~\\", "—–“”‘’…€£¥",
    "\0\x01\x7f\u0085", "ǅǈ", "ﬁﬀ", "\U0001d400\U00020000\U000e0001"]
WORDS = [
    "hello", "world", "the", "function", "return", "import", "def f(x):", "    return x + 1",
    "http://example.com/a?b=c", "I'm", "don't", "DON'T", "we'LL", "HelloWORLD", "foo_bar(x);", "123456789012345",
    "3.14159", "1,000,000", "你好2024年", "price: $3.50/day", " leading", "trailing "]


def random_text():
    parts = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < .45:
            pool = rng.choice(POOLS)
            parts.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 8))))
        elif kind < .75:
            parts.append(rng.choice(WORDS) + rng.choice(["", " ", "\n", "  "]))
        elif kind < .87:
            parts.append(rng.choice(added))
        elif kind < .90:
            token = rng.choice(added)
            parts.append(token[:rng.randint(1, len(token))])
        elif kind < .93:
            parts.append(chr(rng.choice([rng.randint(0x20, 0x2ff), rng.randint(0x300, 0x1fff),
                                         rng.randint(0x2000, 0xd7ff)])))
        else:
            parts.append(rng.choice(" \n\r\t0aZ") * rng.randint(1, 60))
    return "".join(parts)


cases = []
for index in range(count):
    text = random_text()
    case = {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids}
    if index % 2:
        case["skip"] = index % 4 == 1
        case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=case["skip"])
    cases.append(case)
json.dump(cases, open(out, "w"))
