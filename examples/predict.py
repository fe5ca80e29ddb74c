"""Fold a protein from Python, look at its confidence, and write its files.

    python examples/predict.py                                    # protein G with mini, the network that ships
    python examples/predict.py --sequence MKTAYIAKQR --weights params_model_1_ptm.npz --msa query.a3m

The official weights and an alignment are what makes a prediction good; see the README for where they come from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fastfold

PROTEIN_G = "MTPAVTTYKLVINGKTLKGETTTKAVDAETAEKAFKQYANDNGVDGVWTYDDATKTFTVTE"  # 1igd


def main() -> None:
    """Fold, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", default=PROTEIN_G, help="one letter per residue; ':' joins chains")
    parser.add_argument("--weights", default="mini", help="weights file, or mini")
    parser.add_argument("--msa", type=Path, help="alignment of the sequence, .a3m or .sto")
    parser.add_argument("--out", type=Path, default=Path("predict_output"), help="folder for the files")
    args = parser.parse_args()

    model = fastfold.load_model(args.weights)
    prediction = fastfold.predict(args.sequence, model=model, msa=args.msa, seed=0, name="protein")

    print(f"{len(prediction.plddt)} residues, mean pLDDT {prediction.mean_plddt:.1f} of 100")
    if prediction.ptm is not None:
        print(f"predicted TM-score {prediction.ptm:.2f}")
    worst = int(prediction.plddt.argmin())
    print(f"least certain: residue {worst + 1} with pLDDT {prediction.plddt[worst]:.1f}")
    if prediction.pae is not None:
        print(f"mean predicted aligned error {prediction.pae.mean():.1f} Å")

    for kind, path in prediction.save(args.out).items():
        print(f"{kind}: {path}")


if __name__ == "__main__":
    main()
