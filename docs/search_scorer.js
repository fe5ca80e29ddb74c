// Scores of the search's results: Sphinx's own, with the pages for users before those of modules.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("api/") ? score - 100 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
