// Package apierr is what users are told when they do not get what they asked for: a class that says what they can do about it, a text, a hint, and
// facts for programs.
//
// An *Error is made where it is known what the user has to hear, and then names the object and its cause once. Class, text, hint and facts cross the
// socket; the cause in it, for errors.Is and errors.As, does not. What nobody gave a class is Internal. Start reading at New.
package apierr
