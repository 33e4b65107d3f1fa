package wire

import "fmt"

// StoreProgressEvery is how many builds or files are gone through between two reports.
const StoreProgressEvery = 256

// ReportStoreProgress reports progress through a whole store: of so many things, or, where of is 0,
// of an unknown number. progress may be nil.
func ReportStoreProgress(progress func(*Progress), phase, things string, through, of uint64) {
	if progress == nil {
		return
	}
	p := &Progress{Phase: phase, Detail: fmt.Sprintf("%d %s", through, things), Done: through}
	if of > 0 {
		p.Done, p.Total = min(through, of), of
		p.Detail = fmt.Sprintf("%d of %d %s", p.Done, of, things)
	}
	progress(p)
}

// StoreProgress is ReportStoreProgress for the index, of a phase that is called by a verb and the
// things that it goes through.
func StoreProgress(progress func(*Progress), verb string) func(things string, through, of uint64) {
	if progress == nil {
		return nil
	}
	return func(things string, through, of uint64) {
		ReportStoreProgress(progress, verb+" "+things, things, through, of)
	}
}
