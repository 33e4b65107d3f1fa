package index

// Progress hears how far something is that goes through everything: through how many things, which
// are "builds", "files" or "rows of the index", and of how many; 0 where that is not known. A nil
// one hears nothing. It is called on the caller's goroutine and should not wait for anybody.
type Progress func(things string, through, of uint64)

// progressEvery is how many things are gone through between two calls.
const progressEvery = 256

// reportEvery is how many things are done between two reports.
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
