package index

// Progress is told the progress of a long walk: the kind of things ("builds", "files" or "rows of
// the index"), how many are done, and of how many, 0 if unknown. It may be nil. It is called on the
// caller's goroutine and should not block.
type Progress func(things string, through, of uint64)

// progressEvery is the number of things between two calls.
const progressEvery = 256

// reportEvery calls t after every progressEvery things.
func (t Progress) reportEvery(things string, through, of uint64) {
	if t != nil && through%progressEvery == 0 {
		t(things, through, of)
	}
}

func (t Progress) report(things string, through, of uint64) {
	if t != nil {
		t(things, through, of)
	}
}
