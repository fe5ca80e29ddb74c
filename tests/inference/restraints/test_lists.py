"""Lists of AlphaLink and CASP, as their programs document them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.queries.pairs import read_complexes
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.restraints.file import read_restraints
from fastfold.inference.restraints.lists import list_columns
from fastfold.inference.restraints.restraint import Restraint

CHAIN = "HLEGSIGILLKKHEIVFDGCHDFGRTYIWQMSD"  # of CASP's example
HEADER = "PFRMAT RR\nTARGET R9999\nAUTHOR 1234-5678-9000\nREMARK Remarks, and more\nMETHOD Methods\n"
CONTACTS = "MODEL  1\nHLEGSIGILLKKHEIVFDGC\nHDFGRTYIWQMSD\n1  9  0  8  0.70\n1 10  0  8  0.70\n3 12  0  8  0.40\nEND\n"


def read(folder: Path, text: str, sequences: str = CHAIN, notes: list[str] | None = None) -> list[Restraint]:
    path = folder / "links.csv"
    path.write_text(text)
    return read_restraints(path, target_from_sequence(sequences), say=None if notes is None else notes.append)


def test_alphalinks_links_weigh_as_their_share_of_true_ones(tmp_path: Path) -> None:
    """The README's space-separated lines, with commas, tabs, a header, and without rates (0.05 by default)."""
    expected = [
        Restraint(3, 18, 0.0, 10.0, 0.95, "", "line 1"),
        Restraint(24, 6, 0.0, 10.0, 0.8, "", "line 2"),
    ]
    for separator in (" ", ",", "\t", ";"):
        text = "4 19 0.05\n25 7 0.2\n".replace(" ", separator)
        assert read(tmp_path, text) == expected
        lines = [one.line for one in read(tmp_path, f"# photo-leucine\n\n{text}")]
        assert lines == ["line 3", "line 4"]
    named = read(tmp_path, "residueTo,residueFrom,FDR\n19,4,0.05\n")
    assert [(one.first, one.second, one.weight, one.line) for one in named] == [(3, 18, 0.95, "line 2")]
    assert [one.weight for one in read(tmp_path, "4 19\n25 7\n")] == [0.95, 0.95]


def test_probabilities_of_contacts_are_never_read_as_rates_of_false_links(tmp_path: Path) -> None:
    """Contacts of CASP14 without their first line have the form of AlphaLink's links."""
    contacts = "4 19 0.93\n25 7 0.81\n9 30 0.40\n"
    with pytest.raises(InputError, match=r"most third numbers are over 0.5.*'PFRMAT RR'"):
        read(tmp_path, contacts)
    assert [one.atoms for one in read(tmp_path, f"PFRMAT RR\n{contacts}")] == ["CB", "CB"]
    assert len(read(tmp_path, f"residueFrom residueTo FDR\n{contacts}")) == 3
    assert len(read(tmp_path, "4 19 0.93\n25 7 0.2\n")) == 2


def test_contacts_of_a_protein_are_those_of_its_parts(tmp_path: Path) -> None:
    """A file of the full protein, and the part P:1-12 or P:9-20."""
    path = tmp_path / "links.csv"
    path.write_text(HEADER + CONTACTS)
    whole = target_from_sequence(CHAIN, "P")
    (first, second), _ = read_complexes(_lines(tmp_path, "P:1-12\nP:9-20\n"), [whole])
    notes: list[str] = []
    pairs = [(one.first, one.second) for one in read_restraints(path, first, say=notes.append)]
    assert pairs == [(0, 8), (0, 9)]
    assert "counted through the whole proteins of all chains" in notes[0]
    with pytest.raises(InputError, match="residue 1 of 33 is not in the parts"):
        read_restraints(path, second)


def _lines(folder: Path, text: str) -> Path:
    path = folder / "complexes.txt"
    path.write_text(text)
    return path


def test_alphalink2s_links_name_chains(tmp_path: Path) -> None:
    """The README's example, whose second link is between copies of a residue."""
    found = read(tmp_path, "1 A 5 B 0.2\n5 A 5 A 0.1\n", "MKTAYIAKQR:MKTAYIAKQR")
    assert {(one.first, one.second) for one in found if one.line == "line 1"} == {
        (0, 14),
        (0, 4),
        (10, 14),
        (10, 4),
    }
    assert [(one.first, one.second, one.weight) for one in found if one.line == "line 2"] == [(4, 14, 0.9)]
    assert {(one.low, one.high, one.atoms) for one in found} == {(0.0, 25.0, "CA")}
    assert {one.group for one in found} == {"line 1", ""}
    with pytest.raises(InputError, match="line 1: links residue A:Y5 to itself"):
        read(tmp_path, "5 A 5 A 0.1\n", "MKTAYIAKQR")
    header = read(tmp_path, "residueFrom chain1 residueTo chain2 FDR\n1 A 5 B 0.2\n", "MKTAY:GSHMA")
    assert [(one.first, one.second, one.weight) for one in header] == [(0, 9, 0.8)]


def test_alphalinks_distances_are_limits_of_two_deviations(tmp_path: Path) -> None:
    text = "residueFrom,residueTo,meanDistance,standard deviation,distribution type\n4,19,15.0,5.0,normal\n"
    assert read(tmp_path, text) == [Restraint(3, 18, 5.0, 25.0, 1.0, "", "line 2")]
    (one,) = read(tmp_path, "4,19,2.5,0.25,log-normal\n")
    assert (one.low, one.high) == pytest.approx((math.exp(2.0), math.exp(3.0)))
    assert read(tmp_path, "4,19,15.0,10.0,normal\n")[0].low == 0.0
    with pytest.raises(
        InputError, match="line 1: log-normal: expected mean and standard deviation of the logarithm"
    ):
        read(tmp_path, "4,19,15.0,5.0,log-normal\n")


def test_alphalinks_distograms_have_the_limits_of_their_distribution(tmp_path: Path) -> None:
    """As AlphaLink's script writes a normal distribution: 128 bins of 0.3125 Å from 2.3125 Å on."""
    edges = 2.3125 + 0.3125 * np.arange(129)
    cumulated = np.array([0.5 * math.erfc((20.0 - edge) / (5.0 * math.sqrt(2.0))) for edge in edges])
    shares = np.diff(cumulated) / np.diff(cumulated).sum()
    (one,) = read(
        tmp_path, " ".join(["4.000000e+00", "1.900000e+01", *(f"{share:.18e}" for share in shares)]) + "\n"
    )
    assert (one.first, one.second, one.atoms) == (3, 18, "CA")
    assert (one.low, one.high) == pytest.approx((10.0, 30.0), abs=0.3125)
    far = np.zeros(128)
    far[[100, 127]] = 0.5
    (one,) = read(tmp_path, " ".join(map(str, (4, 19, *far))) + "\n")
    assert (one.low, one.high) == (2.3125 + 100 * 0.3125, math.inf)
    with pytest.raises(InputError, match=r"line 1: expected probabilities whose sum is 1, found 0\.5"):
        read(tmp_path, " ".join(map(str, (4, 19, *(far / 2)))) + "\n")


@pytest.mark.parametrize("total", [1.0, 0.995, 1.005])
@pytest.mark.parametrize(
    ("shares", "first", "last"),
    [
        ({0: 0.5, 5: 0.5}, 0, 5),
        ({60: 0.5, 61: 0.5}, 60, 61),
        ({125: 0.5, 126: 0.5}, 125, 126),
        ({126: 0.5, 127: 0.5}, 126, 127),
        (
            {40: 0.02264, 60: 0.95472, 90: 0.02264},
            60,
            60,
        ),  # less than a normal distribution has beyond two deviations
        ({40: 0.02286, 60: 0.95428, 90: 0.02286}, 40, 90),
        ({0: 0.02286, 60: 0.95428, 90: 0.02286}, 0, 90),
    ],
)
def test_limits_of_a_distogram_are_edges_of_its_bins(
    tmp_path: Path, shares: dict[int, float], first: int, last: int, total: float
) -> None:
    """Shares are those of their sum, which is nearly 1. The first bin has no lower limit, the last no upper one."""
    values = [total * shares.get(number, 0.0) for number in range(128)]
    (one,) = read(tmp_path, " ".join(map(str, (4, 19, *values))) + "\n")
    low = 2.3125 + 0.3125 * first if first else 0.0
    high = 2.3125 + 0.3125 * (last + 1) if last < 127 else math.inf
    assert (one.low, one.high) == pytest.approx((low, high))


def test_alphalinks_script_and_its_input_have_the_same_limits(tmp_path: Path) -> None:
    """Recorded output of ``preprocessing_distributions.py``, which draws 10,000 distances for each restraint."""
    published = json.loads(Path(__file__).with_name("published_alphalink.json").read_text())
    restraints = read(tmp_path, published["restraints"])
    distributions = read(tmp_path, "\n".join(published["distributions"]) + "\n")
    assert len(restraints) == 3
    for one, other in zip(restraints, distributions, strict=True):
        assert (one.first, one.second, one.atoms) == (other.first, other.second, other.atoms)
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.5)


def test_casps_probable_contacts_are_between_cb(tmp_path: Path) -> None:
    notes: list[str] = []
    expected = [
        Restraint(0, 8, 0.0, 8.0, 0.7, "", "line 9", "CB"),
        Restraint(0, 9, 0.0, 8.0, 0.7, "", "line 10", "CB"),
    ]
    assert read(tmp_path, HEADER + CONTACTS, notes=notes) == expected
    assert notes == ["links.csv: 1 of 3 contacts have a probability under 0.5 and are left out"]
    bare = read(tmp_path, "1 9 0 8 0.70\n1 10 0 8 0.70\n")
    assert [(one.first, one.second, one.high, one.weight) for one in bare] == [
        (0, 8, 8.0, 0.7),
        (0, 9, 8.0, 0.7),
    ]
    assert [one.weight for one in read(tmp_path, "1 9 0 8 0.50\n1 10 0 8 0.49\n")] == [0.5]
    with_sequence = read(tmp_path, f"{CHAIN}\n1 9 0 8 0.70\n")
    assert [(one.second, one.line) for one in with_sequence] == [(8, "line 2")]


def test_casps_later_contacts_have_bins_or_no_limits(tmp_path: Path) -> None:
    text = "RMODE 2\nMODEL 1\n1 8 .72 .345 .225 .15 .15 .1 .03 0 0 0 0\n31 20 .51 0 .56 .15 .12 .13 .04 0 0 0 0\nEND\n"
    found = read(tmp_path, HEADER + text)
    assert [(one.first, one.second, one.high, one.weight) for one in found] == [
        (0, 7, 8.0, 0.72),
        (30, 19, 8.0, 0.51),
    ]
    assert [one.weight for one in read(tmp_path, HEADER + "RMODE 1\nMODEL 1\n1 8 0.9\nEND\n")] == [0.9]


def test_casps_contacts_between_chains_are_exact_and_others_ambiguous(tmp_path: Path) -> None:
    dimer = f"{CHAIN}:{CHAIN}"
    named = read(tmp_path, HEADER + "MODEL 1\nA1 B9   0  8  0.70\nEND\n", dimer)
    assert [(one.first, one.second, one.group) for one in named] == [(0, 41, "")]
    plain = read(tmp_path, HEADER + "MODEL 1\n1 9   0  8  0.70\nEND\n", dimer)
    assert [(one.first, one.second) for one in plain] == [(0, 8), (0, 41), (33, 8), (33, 41)]
    assert {one.group for one in plain} == {"line 7"}


def test_lists_without_chains_count_through_all_of_them(tmp_path: Path) -> None:
    notes: list[str] = []
    found = read(tmp_path, "4,9,0.05\n", "MKTAY:GSHMA", notes)
    assert [(one.first, one.second) for one in found] == [(3, 8)]
    assert notes == ["links.csv: names no chains; its residues are counted through all chains of the target"]
    notes.clear()
    read(tmp_path, "4,9,0.05\n", "MKTAYIAKQR:MKTAYIAKQR", notes)
    assert notes == []


@pytest.mark.parametrize(
    ("contacts", "is_noted"),
    [
        ("A1 B4 0 8 0.7\n", False),
        ("A1 B4 0 8 0.7\n2 8 0 8 0.7\n", True),
        ("1 9 0 8 0.7\n", True),
    ],
)
def test_contacts_of_residues_without_chains_are_noted(tmp_path: Path, contacts: str, is_noted: bool) -> None:
    notes: list[str] = []
    read(tmp_path, f"PFRMAT RR\n{contacts}", "MKTAY:GSHMA", notes)
    assert len(notes) == is_noted


def test_a_part_of_a_protein_next_to_a_whole_one_is_noted(tmp_path: Path) -> None:
    proteins = [target_from_sequence(CHAIN, "P"), target_from_sequence("MKTAY", "Q")]
    (target,), _ = read_complexes(_lines(tmp_path, "P:1-12+Q\n"), proteins)
    path, notes = tmp_path / "links.csv", list[str]()
    path.write_text("4,9,0.05\n")
    read_restraints(path, target, say=notes.append)
    assert "counted through the whole proteins of all chains" in notes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("4 99 0.05", "the target has residues 1 to 33, found 99"),
        ("4 x 0.05", "expected a residue number such as 10, found 'x'"),
        ("4 19 1.5", "fdr: expected a number from 0 to 1, found 1.5"),
        ("4 19 1", "fdr: expected a number under 1, found 1; remove the line"),
        ("4 4 0.05", "links residue A:G4 to itself"),
        ("4 19 0.05 3", "expected 3 values (residuefrom, residueto, fdr), found 4"),
        ("4", "expected 3 values (residuefrom, residueto, fdr), found 1"),
        ("4.5 19 0.05", "expected a residue number such as 10, found '4.5'"),
        ("inf 19 0.05", "expected a residue number such as 10, found 'inf'"),
        ("4 19 nan", "fdr: expected a number from 0, found 'nan'"),
    ],
)
def test_unusable_links_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, f"4 19 0.05\n{row}\n5 20 0.05\n")
    assert f"links.csv: has unusable restraints:\nline 2: {message}" in str(error.value)
    assert "line 3" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEADER + "MODEL 1\n1 9 0 8\nEND\n",
            "line 7: expected two residues, limits and a probability, found 4 values",
        ),
        (HEADER + "MODEL 1\n1 9 8 0 0.7\nEND\n", "line 7: min 8 is larger than max 0"),
        (
            HEADER + "MODEL 1\n1 9 0 8 1.7\nEND\n",
            "line 7: probability: expected a number from 0 to 1, found 1.7",
        ),
        (HEADER + "MODEL 1\nA1 9 0 8 0.7\nEND\n", "line 7: expected chains for both residues or for none"),
        (HEADER + "MODEL 1\nA1 B9 0 8 0.7\nEND\n", "line 7: unknown chain 'B'; the target has A"),
        (
            HEADER + "MODEL 1\n1 9 0 8 0.2\nEND\n",
            "1 of 1 contacts have a probability under 0.5, and no others",
        ),
        (
            HEADER + "MODEL 1\nMKTAY\n1 4 0 8 0.7\nEND\n",
            "has contacts of another sequence of 5 residues; fold that",
        ),
        (
            HEADER + "MODEL 1\n1 9 0 8 .7\nENDMDL\nMODEL 2\n1 9 0 8 .7\nEND\n",
            "has 2 models; keep one of them",
        ),
        ("PFRMAT TS\nTARGET T1\n", "is in CASP's format 'TS'; expected RR, which has contacts"),
        (HEADER + "END\n", "has no restraint"),
        (
            "residueFrom,residueTo,FDR,score\n1,9,0.1,3\n",
            "has the columns residuefrom, residueto, fdr, score; expected",
        ),
        ("4 19 1.5\n5 20 1.5\n", "line 1: fdr: expected a number from 0 to 1, found 1.5"),
        (HEADER + "MODEL 1\n17\nEND\n", "limits and a probability, found 1 values"),
        (
            f"residueFrom,residueTo,{','.join(f'bin{number}' for number in range(1, 129))}\n4,19,1\n",
            "line 2: expected 130 values (residuefrom, residueto, bin1, bin2, bin3, bin4, …), found 3",
        ),
        ("4,19,15,5,gamma\n", "line 1: distribution type: expected normal or log-normal, found 'gamma'"),
        ("4,19,15,0,normal\n", "line 1: standard deviation: expected a number over 0"),
    ],
)
def test_other_lists_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert "links.csv: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cells", "number", "has_header"),
    [
        (["residueFrom", "residueTo", "FDR"], 3, True),
        (["4", "9", "0.05"], 3, False),
        (["4", "A", "9", "B", "0.2"], 5, False),
        (["4", "9", "12.0", "2.5", "normal"], 5, False),
        (["PFRMAT", "RR"], 5, False),
    ],
)
def test_lists_are_told_by_their_first_row(cells: list[str], number: int, has_header: bool) -> None:
    columns = list_columns(cells)
    assert columns is not None
    assert (len(columns.names), columns.has_header) == (number, has_header)
    assert list_columns(["chain1", "residue1", "chain2", "residue2"]) is None


def test_a_residue_number_has_digits_alone(tmp_path: Path) -> None:
    """Python's ``1_0`` is not residue 10."""
    with pytest.raises(InputError, match="line 2: expected a residue number such as 10, found '1_0'"):
        read(tmp_path, "residueFrom,residueTo,FDR\n1_0,4,0.05\n")
