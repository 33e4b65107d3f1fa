// Package reports decides on what clients report of builds that did not load: whether a build is withheld
// from the reporting user or from all, and whether the client retries or loads the model itself.
//
// Start with Reports.Take. The package stores nothing and loads nothing: the cache examines a build, and
// Options say how a build is withheld, judged and compiled again.
package reports
