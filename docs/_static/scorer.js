// Sphinx ranks by the best single word, so most pages tie. Pages whose title has more of the words come first here.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase().split(/\W+/);
    const words = title.toLowerCase().split(/\W+/);
    return score + asked.filter((word) => words.includes(word)).length;
  },
  // the numbers of Sphinx
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
