"""turngym: the gym in which language-model agents practise turn by turn, and their trainer."""
