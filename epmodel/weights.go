package epmodel

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const (
	maxWeightsMap   = 32 << 20 // length of a weights_metadata_map; 100 bytes for each weight is usual
	maxWeightsDepth = 16       // a map of maps has two levels
)

// weightLocations finds the files that OpenVINO's weights_metadata_map names: a JSON object
//
//	{"<tensor>": {"location": "<file>", "data_offset": <n>, "size": <n>}, ...}
//
// Every "location" counts, however deep, so that a further level in a later version hides nothing.
func (w *walker) weightLocations(c *Context, v attributeValue) {
	if v.s.n > maxWeightsMap {
		w.fail(v.at, "attribute.weights_metadata_map", "%d bytes long, more than %d", v.s.n, maxWeightsMap)
	}
	if v.s.n == 0 || w.err != nil {
		return
	}
	in := &watchedReader{r: io.NewSectionReader(w.src, v.s.off, v.s.n)}
	d := json.NewDecoder(in)
	d.UseNumber()
	known := map[string]bool{}
	err := jsonLocations(d, 0, false, func(s string) error {
		if known[s] {
			return nil
		}
		known[s] = true
		if len(s) > maxPath {
			return fmt.Errorf("a location of %d bytes", len(s))
		}
		c.WeightLocations = append(c.WeightLocations, s)
		w.keep(v.at, len(s))
		return w.err
	})
	if in.err != nil {
		w.err = fmt.Errorf("%s: read weights_metadata_map at offset %d: %w", w.name, v.s.off, in.err)
	}
	if err == nil && d.More() {
		err = errors.New("something follows the object")
	}
	if err != nil {
		w.fail(v.s.off+d.InputOffset(), "attribute.weights_metadata_map", "not the JSON that was expected: %v", err)
	}
}

// watchedReader remembers an error of the file, which a parser above would report as one of its own.
type watchedReader struct {
	r   io.Reader
	err error
}

func (w *watchedReader) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

// jsonLocations reads one value, and calls found for each string that is the value of a "location".
func jsonLocations(d *json.Decoder, depth int, isLocation bool, found func(string) error) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	delim, ok := t.(json.Delim)
	if !ok {
		s, isString := t.(string)
		switch {
		case isLocation && isString:
			return found(s)
		case isLocation:
			return errors.New("a location that is no string")
		case depth == 0:
			return errors.New("not an object")
		}
		return nil
	}
	if depth >= maxWeightsDepth {
		return errors.New("nested too deep")
	}
	if isLocation || depth == 0 && delim != '{' {
		return errors.New("not the expected kind of value")
	}
	for d.More() {
		key := ""
		if delim == '{' {
			k, err := d.Token()
			if err != nil {
				return err
			}
			key, _ = k.(string) // the decoder lets no other key pass
		}
		if err := jsonLocations(d, depth+1, key == "location", found); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}
