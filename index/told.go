package index

// Told hears how far something is that goes through everything: through how many things, which are
// "builds", "files" or "rows of the index", and of how many; 0 where that is not known. A nil one
// hears nothing. It is called on the caller's goroutine and should not wait for anybody.
type Told func(things string, through, of uint64)

// toldEvery is how many things are gone through between two calls.
const toldEvery = 256

// often tells every so many things.
func (t Told) often(things string, through, of uint64) {
	if t != nil && through%toldEvery == 0 {
		t(things, through, of)
	}
}

func (t Told) tell(things string, through, of uint64) {
	if t != nil {
		t(things, through, of)
	}
}
