// Scores of the search's results: Sphinx's own, with pages for users before pages for developers, and these before modules.
const WORK = ["architecture", "reading_path", "glossary", "benchmarks", "contributing", "changelog", "releases", "reference"];
var Scorer = {
  score: ([page, , , , score]) => score - (page.startsWith("api/") ? 100 : WORK.includes(page) ? 50 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
