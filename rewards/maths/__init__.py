"""Mathematical equality of short written answers: notation, grammar, exact and numeric comparison.

    notation   LaTeX, plain text and Unicode -> tokens
    grammar    tokens -> tree (`nodes`)
    exact      tree -> rational number, with size guards
    numeric    tree -> floating point at any precision
    compare    do two trees say the same thing?
    grade      a whole response against a gold answer

Nothing here is killable: `turngym.rewards.equivalence` runs it in worker processes.
"""
