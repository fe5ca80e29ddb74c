"""Reading, writing and recognising weights files of AlphaFold, OpenFold and FastFold."""
