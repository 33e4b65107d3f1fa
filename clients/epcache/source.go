package epcache

import "github.com/epcached/epcached/clients/epcache/modelsource"

// Source is a source model that this process opened with its own rights.
type Source = modelsource.Source

// OpenSource opens a model. It does not block on a FIFO.
func OpenSource(path string) (*Source, error) { return modelsource.Open(path) }
