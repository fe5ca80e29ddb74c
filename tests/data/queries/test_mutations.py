"""Damaged queries are read or refused: no parser raises anything but the package's own errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from fastfold.data.features.assembly import multimer_features
from fastfold.data.msa.formats import parse_colabfold
from fastfold.data.msa.msa import parse_a3m
from fastfold.data.queries.entities import parse_entities
from fastfold.data.queries.fasta import parse_fasta
from fastfold.data.queries.formats import parse_a3m_query, parse_table
from fastfold.data.queries.records import QueryFile, Record, targets_of_records
from fastfold.data.targets import Target, unique_targets
from fastfold.errors import FastFoldError, InputError

COMPLEX = (
    b"#6,4\t2,1\n>1\t2\nMKVLAAWYFG\n>a\tb\nMKaVLA-WY-G\n>1\nMKVLAA----\n>u\nMK--AA----\n>2\n------WYFG\n"
)
SEEDS = {
    "fasta": b"# note\n>one some text\nMKVLAA\nWYFG\n>two|x\nmkv:LLAG*\n\n>three\nMBZU\n",
    "a3m": b">q text\nMKVLAAWYFG\n>h1\nMKaVLA-WY-G\n>h2\nMK..LAAWYFG\n#\n>h3\nMKVLA\nAWYFG\n",
    "complex": COMPLEX,
    "homomer": b"#4\t3\n>1\nWYFG\n>u\nW-cFG\n",
    "yaml": b"sequences:\n- protein: {id: [A, B], sequence: MKVLAA}\n- protein: {id: C, sequence: WYFG}\n",
    "json": b'{"name": "one", "sequences": [{"protein": {"id": "A", "sequence": "MKVLAA"}}]}',
    "table": b'id,sequence,note\none,MKVLAA,x\n"two, b",MKV:LLAG,"a\nb"\n,WYFG,\n',
}
TOKENS = [
    *(
        b">",
        b"\n",
        b"\r\n",
        b"\r",
        b"\t",
        b",",
        b":",
        b"*",
        b"-",
        b".",
        b"#",
        b"\0",
        b'"',
        b" ",
        b"|",
        b"\x1c",
    ),
    *(b"\xff", b"\xef\xbb\xbf", "β".encode(), b"//", b"# STOCKHOLM 1.0\n", b"#3,2\t1,1\n", b"0", b"99999999"),
    *(b"id", b"sequence", b"a3mpath", b"MKV", b"aaaa", b"-" * 40, b"\xed\xb3\xbf", b"\xe2\x80\xa8"),
]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to six random changes of some bytes: replaced, left out, repeated, moved, cut off, or others put in."""
    for _ in range(rng.randint(1, 6)):
        start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        end = min(end, start + rng.choice((1, 1, 3, 20)))
        piece = data[start:end]
        kind = rng.randrange(7)
        if kind == 0:
            piece = bytes(rng.randrange(256) for _ in piece)
        elif kind == 1:
            piece = b""
        elif kind == 2:
            piece *= rng.choice((2, 3, 50))
        elif kind == 3:
            piece += rng.choice(TOKENS)
        elif kind == 4:
            piece = piece.swapcase()
        elif kind == 5:
            data, piece = data[:start] + data[end:], piece + rng.choice(TOKENS)
            start = end = rng.randrange(len(data) + 1)
        else:
            end = len(data) if rng.random() < 0.3 else end
        data = data[:start] + piece + data[end:]
    return data


def targets(
    parse: Callable[[QueryFile], Iterable[Record | InputError]], file: QueryFile, complex_: bool = False
) -> list[Target]:
    errors: list[InputError] = []
    return unique_targets(targets_of_records(parse(file), file, errors, complex_=complex_), errors)


def by_fasta(data: bytes, complex_: bool) -> list[Target]:
    return targets(parse_fasta, QueryFile("in.fasta", data), complex_)


def by_table(data: bytes, complex_: bool) -> list[Target]:
    return targets(parse_table, QueryFile("/nonexistent/in.csv", data), complex_)


def by_a3m(data: bytes, complex_: bool) -> list[Target]:
    return targets(lambda file: [parse_a3m_query(file)], QueryFile("in.a3m", data))


def by_entities(data: bytes, complex_: bool) -> list[Target]:
    return targets(parse_entities, QueryFile("in.json" if complex_ else "in.yaml", data))


def by_alignment(data: bytes, complex_: bool) -> list[Target]:
    text = data.decode("utf-8", "replace")
    (parse_colabfold if complex_ else parse_a3m)(text)
    return []


PARSERS: dict[str, Callable[[bytes, bool], list[Target]]] = {
    "fasta": by_fasta,
    "table": by_table,
    "entities": by_entities,
    "a3m": by_a3m,
    "alignment": by_alignment,
}


def run(parser: str, number: int) -> tuple[int, int]:
    """Reads mutated inputs; returns how many were accepted and how many refused."""
    rng = random.Random(f"{parser} 16")
    read = PARSERS[parser]
    accepted = refused = 0
    for _ in range(number):
        data = mutated(rng, rng.choice(list(SEEDS.values())))
        complex_ = rng.random() < 0.3
        try:
            targets = read(data, complex_)
            for target in targets:
                assert all(chain.sequence for chain in target.chains)
                if target.alignments is not None and target.num_residues < 200:
                    merged = multimer_features(target.chains, target.alignments)
                    assert len(merged["aatype"]) == target.num_residues
        except FastFoldError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{parser} of {data!r} (complex_={complex_})") from error
        else:
            accepted += 1
    return accepted, refused


@pytest.mark.parametrize("parser", PARSERS)
def test_no_damage_raises_a_foreign_error(parser: str) -> None:
    """Hundreds of each; enough are accepted for the check of what is accepted to mean something."""
    accepted, refused = run(parser, 1600)
    assert accepted > 40
    assert refused > 40


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
def test_no_damage_of_ten_thousand_raises_a_foreign_error(parser: str) -> None:
    accepted, refused = run(parser, 10_000)
    assert accepted + refused == 10_000
