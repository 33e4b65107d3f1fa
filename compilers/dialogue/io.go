package dialogue

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ErrMalformed is wrapped by errors about bytes that are not a message of this version.
var ErrMalformed = errors.New("malformed dialogue")

// WriteRequest sends the request.
func WriteRequest(w io.Writer, r Request) error {
	r.Version = Version
	return writeLine(w, r, MaxRequest)
}

// ReadRequest reads what WriteRequest sent.
func ReadRequest(r *bufio.Reader) (Request, error) {
	line, err := readLine(r, MaxRequest)
	if err != nil {
		return Request{}, fmt.Errorf("request: %w", err)
	}
	var req Request
	if err := json.Unmarshal(line, &req); err != nil {
		return Request{}, fmt.Errorf("request: %w: %w", ErrMalformed, err)
	}
	if req.Version != Version {
		return Request{}, fmt.Errorf("request: %w: version %d, this worker speaks %d: epcached and epcached-ort must be of one installation", ErrMalformed, req.Version, Version)
	}
	return req, nil
}

type goOn struct{ Go bool }

// WriteGo tells a worker that waits that the model is there.
func WriteGo(w io.Writer) error { return writeLine(w, goOn{true}, MaxRequest) }

// ReadGo waits for WriteGo. io.ErrUnexpectedEOF means that the caller gave up. The reader has to be that of ReadRequest.
func ReadGo(r *bufio.Reader) error {
	line, err := readLine(r, MaxRequest)
	if err != nil {
		return fmt.Errorf("wait for the model: %w", err)
	}
	var told goOn
	if err := json.Unmarshal(line, &told); err != nil || !told.Go {
		return fmt.Errorf("wait for the model: %w: %q", ErrMalformed, line)
	}
	return nil
}

// WriteEvent sends one event.
func WriteEvent(w io.Writer, e Event) error { return writeLine(w, e, MaxEvent) }

// ReadEvents reads events until one ends the request, and returns that one; those before it go to each as they come. io.ErrUnexpectedEOF means that
// the worker ended before it had an answer.
func ReadEvents(r io.Reader, each func(Event)) (Event, error) {
	lines := bufio.NewReader(r)
	for range MaxEvents {
		line, err := readLine(lines, MaxEvent)
		if err != nil {
			return Event{}, err
		}
		var e Event
		if err := json.Unmarshal(line, &e); err != nil {
			return Event{}, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		if e.Result != nil || e.Refusal != nil {
			return e, nil
		}
		each(e)
	}
	return Event{}, fmt.Errorf("%w: more than %d events", ErrMalformed, MaxEvents)
}

func writeLine(w io.Writer, v any, limit int) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("dialogue: %w", err)
	}
	if len(line) >= limit {
		return fmt.Errorf("dialogue: message of %d bytes: the limit is %d", len(line), limit)
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("dialogue: %w", err)
	}
	return nil
}

// readLine reads up to a line feed, at most limit bytes: memory grows with what arrives, never with what is announced.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("%w: a message of more than %d bytes", ErrMalformed, limit)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			return nil, io.ErrUnexpectedEOF // messages end with a line feed: a shorter one was cut off
		default:
			return nil, err
		}
	}
}
